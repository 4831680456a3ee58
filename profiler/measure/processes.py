"""Several processes of one machine, gloo on the CPU or NCCL on CUDA devices."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_core.errors import PiperError
from piper_core.frontend.heap import keep_heap

LIMIT_S = 600.0
PR_SET_PDEATHSIG = 1
"""``prctl`` option of Linux: the signal to get when the parent dies."""


def on_processes(function: Callable[..., Any], size: int, *args: object, kind: str = "cpu", threads: int = 1,
                 timeout_s: float = LIMIT_S, fork: bool = False) -> list[Any]:  # fmt: skip
    """Return ``function(rank, *args)`` of every rank, each in a process of its own with a default group.

    The function and what it takes and gives are pickled; with ``fork``, from a process without other threads, its
    arguments are shared instead. However this ends, no process is left.

    Raises:
        PiperError: one of our errors that a rank raised; a rank that failed, died or gave no answer in time.
    """
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    with tempfile.TemporaryDirectory(prefix="piper-") as where:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        started = []
        try:
            for rank, (_, sender) in enumerate(pipes):
                place = (rank, size, str(Path(where) / "store"), kind, threads, timeout_s)
                process = context.Process(target=_one, args=(function, place, sender, args), daemon=True)
                process.start()
                sender.close()
                started.append(process)
            return _answers([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in started:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _answers(receivers: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Return what every rank gives; the first that fails ends it for all."""
    answers: dict[int, Any] = {}
    while len(answers) < len(receivers):
        open_ = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in answers}
        ready = wait(list(open_), timeout_s)
        if not ready:
            raise PiperError(f"ranks {sorted(open_.values())} gave no answer in {timeout_s:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_[receiver]
            try:
                good, answer = receiver.recv()
            except EOFError:
                raise PiperError(f"rank {rank} of {len(receivers)} died") from None
            if isinstance(answer, PiperError):
                raise answer
            if not good:
                raise PiperError(f"rank {rank} of {len(receivers)} failed: {answer.strip().splitlines()[-1][:300]}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(receivers))]


def _one(function: Callable[..., Any], place: tuple[int, int, str, str, int, float], sender: Connection,
         args: Sequence[object]) -> None:  # fmt: skip
    """Be one rank. Ctrl-C is the parent's business, who ends us, and with whom we end however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank, size, store, kind, threads, timeout_s = place
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    backend = "gloo"
    if kind == "cpu":
        keep_heap()
    if kind == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        dist.barrier()  # a rank that is done at once would leave while others still connect to it
        sender.send((True, function(rank, *args)))
    except PiperError as error:
        sender.send((False, error))
    except Exception:
        sender.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
