"""Real processes: the communicator on ``torch.distributed``, gloo on the CPU.

Every channel has a tag of its own and every (group, label) a process group of its own, so that nothing waits for what
it has nothing to do with. A message counts as over for the sender when the receiver has it; a thread a channel waits
for that, so that what was sent is let go of as soon as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # the options of collectives that have had several names

from piper_core.runtime.communicator import Group, Work
from piper_core.runtime.cores import carry
from piper_core.runtime.process_group import ProcessCommunicator, handle, started

SMALL_BYTES = 1 << 18
"""Bytes that a rank may receive for an all_reduce in one exchange; with more of them a ring is faster."""


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


class _Reduced:
    """Everybody's values on their way; whoever waits reduces them, in the order of the members."""

    __slots__ = ("_every", "_into", "_reduce", "_work")

    def __init__(self, work: Work, every: Tensor, into: Tensor, operation: str) -> None:
        self._work, self._every, self._into, self._reduce = work, [every], into, _REDUCE[operation]

    def wait(self) -> None:
        """Return when the tensor holds what all have together."""
        if self._every:
            self._work.wait()
            into = self._into.view(-1)
            first, *others = self._every.pop().view(-1, into.numel())
            into.copy_(first)
            for each in others:
                self._reduce(into, each, out=into)


_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class GlooCommunicator(ProcessCommunicator):
    """One process's communicator on CPU. ``torch.distributed`` ends after :meth:`close`."""

    backend = "gloo"

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__(timeout_s)
        self._lines: dict[tuple[int, int], SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []

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
            carry()
            while (sent := line.get()) is not None:
                sent.finish()

        self._lines[peer, channel] = line
        thread = threading.Thread(target=run, name=f"sent to {peer} on {channel}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return started(dist.irecv(tensor, peer, tag=channel))

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        """Small tensors go whole to everybody, who reduces them: one exchange where gloo's ring makes two for each
        member but one, each of which wakes a thread."""
        others = len(group.ranks) - 1
        if others * tensor.numel() * tensor.element_size() > SMALL_BYTES:
            return super().all_reduce(tensor, group, operation)
        every = tensor.new_empty((others + 1) * tensor.numel())
        return _Reduced(self.all_gather(every, tensor.view(-1), group), every, tensor, operation)

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        return started(handle(group)._allgather_base(out, part, c10d.AllgatherOptions()))

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        """Exchange parts and add them up here: gloo's own reduces everything everywhere, and takes twice as long."""
        parts = torch.empty_like(whole)
        return _Scattered(started(dist.all_to_all_single(parts, whole, group=handle(group), async_op=True)), parts, out)

    def close(self) -> None:
        """End the channels' threads, having waited for what was sent."""
        for line in self._lines.values():
            line.put(None)
        for thread in self._threads:
            thread.join()
        self._lines.clear()
        self._threads.clear()
