"""Ranks that are threads of one process: a communicator that is no process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from piper_core.frontend.communicator import Operation

WAIT_S = 60.0


class Meeting:
    """What the members of one group have laid down; all have come before any reads, and read before any comes again."""

    def __init__(self, size: int) -> None:
        self.size, self.table, self.barrier = size, [None] * size, Barrier(size)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.table[rank] = mine
        self.barrier.wait(WAIT_S)
        found = list(self.table)
        self.barrier.wait(WAIT_S)
        return found


@dataclass(frozen=True, slots=True)
class Virtual:
    """One rank: its place and its meeting by axis."""

    places: Mapping[str, int]
    meetings: Mapping[str, Meeting]

    def rank(self, axis: str) -> int:
        return self.places[axis]

    def all_reduce(self, x: Tensor, operation: Operation, axis: str) -> Tensor:
        every = torch.stack(self._exchange(x, axis))
        return every.sum(0) if operation == "sum" else every.amax(0)

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return torch.cat(self._exchange(x, axis))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        parts = [each.chunk(self.meetings[axis].size)[self.places[axis]] for each in self._exchange(x, axis)]
        return torch.stack(parts).sum(0)

    def all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Tensor:
        came = torch.cat([each[self.places[axis]] for each in self._exchange(x.split(list(leaving)), axis)])
        assert len(came) == sum(arriving)
        return came

    def pass_on(self, tensors: Sequence[Tensor], axis: str) -> Callable[[], list[Tensor]]:
        every = self._exchange([each.clone() for each in tensors], axis)
        return lambda: list(every[(self.places[axis] - 1) % len(every)])

    def _exchange(self, mine: Any, axis: str) -> list[Any]:
        return self.meetings[axis].exchange(self.places[axis], mine)
