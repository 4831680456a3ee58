"""Real processes: the communicator on ``torch.distributed``, gloo on the CPU.

Every channel has a tag of its own and every (group, label) a process group of its own, so that nothing waits for what
it has nothing to do with. A message counts as over for the sender when the receiver has it; a thread a channel waits
for that, so that what was sent is let go of as soon as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options of collectives that have had several names

from piper_core.runtime.communicator import Group, Work

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class GlooGroup:
    """Members and their process group."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup


class _Sent:
    """A message on its way; holds the tensor until the receiver has it."""

    __slots__ = ("_error", "_over", "_tensor", "_work")

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work, self._tensor, self._over = work, [tensor], threading.Event()
        self._error: BaseException | None = None

    def finish(self) -> None:
        """Wait for the receiver; called by the channel's thread."""
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._tensor.clear()
        self._over.set()

    def wait(self) -> None:
        """Return when the receiver has it."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class _Scattered:
    """Parts of sums under way; whoever waits adds them up, in the order of the members."""

    __slots__ = ("_out", "_parts", "_work")

    def __init__(self, work: Work, parts: Tensor, out: Tensor) -> None:
        self._work, self._parts, self._out = work, [parts], out

    def wait(self) -> None:
        """Return when the sum of this rank's parts is there."""
        if self._parts:
            self._work.wait()
            torch.sum(self._parts.pop().view(-1, self._out.numel()), 0, out=self._out.view(-1))


class GlooCommunicator:
    """One process's communicator. ``torch.distributed`` is set up before it is made, and ended after :meth:`close`.

    Groups are made by all of their members, in one order for every two of them; see :meth:`prepare`.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], GlooGroup] = {}
        self._lines: dict[tuple[int, int], SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []

    def group(self, ranks: tuple[int, ...], label: str) -> Group:
        if (ranks, label) not in self._groups:
            handle = dist.new_group(
                list(ranks), timeout=self._timeout, backend="gloo", use_local_synchronization=True,
                group_desc=f"{label}-{'-'.join(map(str, ranks))}",
            )  # fmt: skip
            assert isinstance(handle, dist.ProcessGroup)
            self._groups[ranks, label] = GlooGroup(ranks, ranks.index(self.rank), handle)
        return self._groups[ranks, label]

    def send(self, tensor: Tensor, peer: int, channel: int) -> Work:
        work = dist.isend(tensor, peer, tag=channel)
        assert work is not None
        sent = _Sent(work, tensor)
        if (peer, channel) not in self._lines:
            self._open(peer, channel)
        self._lines[peer, channel].put(sent)
        return sent

    def _open(self, peer: int, channel: int) -> None:
        line: SimpleQueue[_Sent | None] = SimpleQueue()

        def run() -> None:
            while (sent := line.get()) is not None:
                sent.finish()

        self._lines[peer, channel] = line
        thread = threading.Thread(target=run, name=f"sent to {peer} on {channel}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return _started(dist.irecv(tensor, peer, tag=channel))

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        return _started(dist.all_reduce(tensor, _OPERATIONS[operation], _handle(group), async_op=True))

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        return _started(_handle(group)._allgather_base(out, part, c10d.AllgatherOptions()))

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        """Exchange parts and add them up here: gloo's own reduces everything everywhere, and takes twice as long."""
        parts = torch.empty_like(whole)
        return _Scattered(
            _started(dist.all_to_all_single(parts, whole, group=_handle(group), async_op=True)), parts, out
        )

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> Work:
        work = dist.all_to_all_single(out, given, list(arriving), list(leaving), _handle(group), async_op=True)
        return _started(work)

    def close(self) -> None:
        """End the channels' threads, having waited for what was sent."""
        for line in self._lines.values():
            line.put(None)
        for thread in self._threads:
            thread.join()
        self._lines.clear()
        self._threads.clear()


def _handle(group: Group) -> dist.ProcessGroup:
    assert isinstance(group, GlooGroup)
    return group.handle


def _started(work: Work | None) -> Work:
    assert work is not None
    return work
