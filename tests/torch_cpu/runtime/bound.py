"""A rank that says on which cores its threads may run, and in which slices."""

from __future__ import annotations

import ctypes
import os
import platform

import torch
import torch.distributed as dist

from profiler.measure.exchanges import THERE, exchanges

_TASKS = "/proc/self/task"
_GET_ATTR = {"x86_64": 315, "aarch64": 275}


def bound(rank: int) -> tuple[set[int], list[set[int]], list[int]]:
    """Be a rank that has sent a message; return the cores of its main thread and of those that were there before it was
    bound or wait for messages, and the slices of all these."""
    before = [int(task) for task in os.listdir(_TASKS) if int(task) != os.getpid()]
    with exchanges("cpu") as made:
        given, came = torch.ones(4), torch.empty(4)
        peer = 1 - dist.get_rank()
        for work in (made.communicator.send(given, peer, THERE), made.communicator.recv(came, peer, THERE)):
            work.wait()
        waiting = [thread.native_id for thread in made.communicator._threads]  # type: ignore[union-attr]  # gloo's
        others = [*before, *waiting]
        return os.sched_getaffinity(0), [os.sched_getaffinity(t) for t in others], [_slice(t) for t in (0, *others)]


def _slice(task: int) -> int:
    taken = (ctypes.c_uint64 * 7)()
    assert ctypes.CDLL(None).syscall(_GET_ATTR[platform.machine()], task, taken, 56, 0) == 0
    return int(taken[3])
