"""Real processes on CUDA devices: the communicator on ``torch.distributed``, NCCL.

NCCL has no tags and runs what one process group is given in order, so every channel has a group of its own two ranks;
waiting for an operation orders the streams and does not stop the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from piper_core.runtime.communicator import Group, Work

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class NcclGroup:
    """Members and their process group."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup


class _Sent:
    """A message on its way; the tensor's memory is not used anew before it has been read."""

    __slots__ = ("_work",)

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work = work
        tensor.record_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        """Order what follows on this stream after the message."""
        self._work.wait()


class NcclCommunicator:
    """One process's communicator. ``torch.distributed`` is set up before it is made."""

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], NcclGroup] = {}

    def group(self, ranks: tuple[int, ...], label: str) -> Group:
        if (ranks, label) not in self._groups:
            handle = dist.new_group(
                list(ranks), timeout=self._timeout, backend="cpu:gloo,cuda:nccl", use_local_synchronization=True,
                group_desc=f"{label}-{'-'.join(map(str, ranks))}",
            )  # fmt: skip
            assert isinstance(handle, dist.ProcessGroup)
            self._groups[ranks, label] = NcclGroup(ranks, ranks.index(self.rank), handle)
        return self._groups[ranks, label]

    def _channel(self, source: int, target: int, channel: int) -> dist.ProcessGroup:
        """Return the two ranks' own group for one direction of one channel; both make it at its first message."""
        pair = (min(source, target), max(source, target))
        return _handle(self.group(pair, f"channel {channel} from {source}"))

    def send(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return _Sent(_started(dist.isend(tensor, peer, self._channel(self.rank, peer, channel))), tensor)

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return _started(dist.irecv(tensor, peer, self._channel(peer, self.rank, channel)))

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        return _started(dist.all_reduce(tensor, _OPERATIONS[operation], _handle(group), async_op=True))

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        return _started(dist.all_gather_into_tensor(out, part, _handle(group), async_op=True))

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        return _started(dist.reduce_scatter_tensor(out, whole, group=_handle(group), async_op=True))

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> Work:
        work = dist.all_to_all_single(out, given, list(arriving), list(leaving), _handle(group), async_op=True)
        return _started(work)

    def close(self) -> None:
        """Wait until everything has run."""
        torch.cuda.synchronize()


def _handle(group: Group) -> dist.ProcessGroup:
    assert isinstance(group, NcclGroup)
    return group.handle


def _started(work: Work | None) -> Work:
    assert work is not None
    return work
