"""Real processes on CUDA devices: the communicator on ``torch.distributed``, NCCL.

NCCL has no tags and runs what one process group is given in order, so every channel has a group of its own two ranks;
waiting for an operation orders the streams and does not stop the process. None of this has been run: no CUDA device was
at hand.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from piper_core.runtime.communicator import Group, Work
from piper_core.runtime.process_group import ProcessCommunicator, handle, started


class _Sent:
    """A message on its way; the tensor's memory is not used anew before it has been read."""

    __slots__ = ("_work",)

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work = work
        tensor.record_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        """Order what follows on this stream after the message."""
        self._work.wait()


class NcclCommunicator(ProcessCommunicator):
    """One process's communicator on CUDA."""

    backend = "cpu:gloo,cuda:nccl"

    def _channel(self, source: int, target: int, channel: int) -> dist.ProcessGroup:
        """Return the two ranks' own group for one direction of one channel; both make it at its first message."""
        pair = (min(source, target), max(source, target))
        return handle(self.group(pair, f"channel {channel} from {source}"))

    def send(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return _Sent(started(dist.isend(tensor, peer, self._channel(self.rank, peer, channel))), tensor)

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        return started(dist.irecv(tensor, peer, self._channel(peer, self.rank, channel)))

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        return started(dist.all_gather_into_tensor(out, part, handle(group), async_op=True))

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        return started(dist.reduce_scatter_tensor(out, whole, group=handle(group), async_op=True))

    def close(self) -> None:
        """Wait until everything has run."""
        torch.cuda.synchronize()
