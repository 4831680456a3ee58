"""How a chunk graph reaches other ranks: every collective inside a graph asks the communicator of the moment.

Graphs name an axis ("tensor", "expert" or "context") and never a group or a rank, so that one graph serves every rank,
and real processes as well as virtual ones::

    with communicating(ProcessGroups({"tensor": group})):
        values = action.call(arguments)

The communicator is held by a context variable: each thread (each virtual rank) has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from piper_core.errors import PiperError

Operation: TypeAlias = Literal["sum", "max"]
# Names since torch 2.13, and those before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Communicator(Protocol):
    """What graphs ask of one rank's groups. Calls return when the result is there; results are new tensors, and
    arguments stay as they are. Tensors are contiguous; they are joined and cut along dimension 0."""

    def rank(self, axis: str) -> int:
        """Return this rank's place in its group."""

    def all_reduce(self, x: Tensor, operation: Operation, axis: str) -> Tensor:
        """Return the sum or the maximum of all ranks' x."""

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """Return the x of all ranks, one after another."""

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Return this rank's part of the sum of all ranks' x; parts are equal."""

    def all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Tensor:
        """Send ``leaving[r]`` rows of x to rank r, in order; return the ``arriving[r]`` rows of rank r, in order. Any
        number may be 0, of all rows as well."""

    def pass_on(self, tensors: Sequence[Tensor], axis: str) -> Callable[[], list[Tensor]]:
        """Begin to send tensors to the next rank of the ring; the call that is returned gives those of the rank before,
        of the same shapes."""


_current: ContextVar[Communicator] = ContextVar("communicator")


def communicator() -> Communicator:
    """Return the communicator of the moment.

    Raises:
        PiperError: there is none: a graph with collectives was run outside :func:`communicating`.
    """
    found = _current.get(None)
    if found is None:
        raise PiperError("a graph with collectives runs inside communicating(...), which says who the other ranks are")
    return found


@contextmanager
def communicating(ours: Communicator) -> Iterator[None]:
    """Collectives of graphs, and of divided models run eagerly, go through ``ours`` inside."""
    token = _current.set(ours)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups of torch.distributed by axis: gloo or NCCL."""

    groups: Mapping[str, dist.ProcessGroup]

    def rank(self, axis: str) -> int:
        return self.groups[axis].rank()

    def all_reduce(self, x: Tensor, operation: Operation, axis: str) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, _OPERATIONS[operation], self.groups[axis])
        return total

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        group = self.groups[axis]
        every = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        _all_gather(every, x, group)
        return every

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        group = self.groups[axis]
        part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        _reduce_scatter(part, x, group=group)
        return part

    def all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Tensor:
        came = x.new_empty(sum(arriving), *x.shape[1:])
        dist.all_to_all_single(came, x, list(arriving), list(leaving), self.groups[axis])
        return came

    def pass_on(self, tensors: Sequence[Tensor], axis: str) -> Callable[[], list[Tensor]]:
        group = self.groups[axis]
        to, source = (dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1))
        came = [torch.empty_like(each) for each in tensors]
        calls = [dist.P2POp(dist.isend, each, to, group) for each in tensors]
        calls += [dist.P2POp(dist.irecv, each, source, group) for each in came]
        works = dist.batch_isend_irecv(calls)

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return came

        return arrived
