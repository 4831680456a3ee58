"""Which groups a rank is in, and how the collectives inside graphs reach them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from piper_core.arch.contract import Method
from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.ir.dag import Dag
from piper_core.ir.shard_state import Ranks, ShardState
from piper_core.names import Region
from piper_core.runtime.communicator import Communicator, Group, Work

AXES = ("tensor", "expert", "context")


def degrees_of(dag: Dag) -> Degrees:
    """Return how a compiled program divides the model inside chunks.

    Raises:
        ConfigError: it divides chunks differently, which graphs cannot follow.
    """
    states = _states(dag)
    tensor = {(state.tensor_degree, state.sequence) for _, state in states}
    context = {(state.context_degree, state.context_method) for _, state in states}
    expert = {state.expert_degree for chunk, state in states if dag.chunks[chunk].region is Region.EXPERT} or {1}
    for axis, values in (("tensor", tensor), ("context", context), ("expert", expert)):
        if len(values) > 1:
            raise ConfigError(
                f"the program divides chunks differently by {axis}; the runtime divides all alike: give the shard "
                "directive a filter that matches all of them"
            )
    (tensor_degree, sequence), (context_degree, method), expert_degree = tensor.pop(), context.pop(), expert.pop()
    known: Method = "all_to_all" if method == "all_to_all" else "ring"
    return Degrees(tensor_degree, sequence, expert_degree, context_degree, known)


def _states(dag: Dag) -> list[tuple[int, ShardState]]:
    index = dag.compute.nonzero()[0]
    pairs = sorted(set(zip(dag.nodes.chunk[index].tolist(), dag.nodes.state[index].tolist(), strict=True)))
    return [(chunk, dag.states[state]) for chunk, state in pairs]


def axis_ranks(dag: Dag, rank: int, stages: Sequence[int]) -> dict[str, Ranks]:
    """Return the ranks of each axis that a rank exchanges with inside graphs; axes of one rank are left out."""
    found: dict[str, set[Ranks]] = {axis: set() for axis in AXES}
    index = dag.compute.nonzero()[0]
    held = {
        (int(s)) for n, s in zip(index.tolist(), dag.nodes.state[index].tolist(), strict=True)
        if int(dag.nodes.stage[n]) in stages and rank in dag.groups[int(dag.nodes.group[n])]
    }  # fmt: skip
    for state in (dag.states[each] for each in held):
        for axis, groups in zip(AXES, (state.tensor, state.expert, state.context), strict=True):
            found[axis] |= {group for group in groups if rank in group and len(group) > 1}
    for axis, mine in found.items():
        if len(mine) > 1:
            raise ConfigError(f"rank {rank} divides its stages by {axis} over different ranks: {sorted(mine)[:2]}")
    return {axis: mine.pop() for axis, mine in found.items() if mine}


Arrived: TypeAlias = Callable[[], Tensor]
"""Waits for the result of a collective that was begun."""


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """The frontend's communicator (:mod:`piper_core.frontend.communicator`) on ours: what graphs wait for."""

    communicator: Communicator
    groups: Mapping[str, Group]
    ring: int
    """Channel of what goes round a ring; no other messages use it."""

    def rank(self, axis: str) -> int:
        return self.groups[axis].index

    def all_reduce(self, x: Tensor, operation: str, axis: str) -> Tensor:
        return self.begin_all_reduce(x, operation, axis)()

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return self.begin_all_gather(x, axis)()

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        return self.begin_reduce_scatter(x, axis)()

    def all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Tensor:
        return self.begin_all_to_all(x, arriving, leaving, axis)()

    # --- the same, not waited for ---

    def begin_all_reduce(self, x: Tensor, operation: str, axis: str) -> Arrived:
        total = x.clone()
        return _arrived(self.communicator.all_reduce(total, self.groups[axis], operation), total)

    def begin_all_gather(self, x: Tensor, axis: str) -> Arrived:
        group = self.groups[axis]
        every = x.new_empty(len(group.ranks) * x.shape[0], *x.shape[1:])
        return _arrived(self.communicator.all_gather(every, x, group), every, x)

    def begin_reduce_scatter(self, x: Tensor, axis: str) -> Arrived:
        group = self.groups[axis]
        part = x.new_empty(x.shape[0] // len(group.ranks), *x.shape[1:])
        return _arrived(self.communicator.reduce_scatter(part, x, group), part, x)

    def begin_all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Arrived:
        came = x.new_empty(sum(arriving), *x.shape[1:])
        return _arrived(self.communicator.all_to_all(came, x, arriving, leaving, self.groups[axis]), came, x)

    def pass_on(self, tensors: Sequence[Tensor], axis: str) -> Callable[[], list[Tensor]]:
        group = self.groups[axis]
        size = len(group.ranks)
        to, source = (group.ranks[(group.index + step) % size] for step in (1, -1))
        came = [torch.empty_like(each) for each in tensors]
        works = [self.communicator.send(each, to, self.ring) for each in tensors]
        works += [self.communicator.recv(each, source, self.ring) for each in came]

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return came

        return arrived


def _arrived(work: Work, result: Tensor, *given: Tensor) -> Arrived:
    """Return what waits for a result; what was ``given`` is held until then, since it may still be read."""
    held = list(given)

    def wait() -> Tensor:
        work.wait()
        held.clear()
        return result

    return wait
