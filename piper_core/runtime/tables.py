"""What one row does, from the compiled DAG and plan: the same for all ranks of the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.fx import Node

from piper_core.errors import ConfigError
from piper_core.frontend.cut import Cut
from piper_core.ir.action import COMPUTE_KINDS, ActionKind
from piper_core.ir.dag import Dag
from piper_core.names import NodeKind, Phase, Role
from piper_core.runtime.apart import Part
from piper_core.runtime.graphs import Macros, Spec, Unit
from piper_core.runtime.steps import INNER, RECVS, SENDS, Do, Step, flatten
from piper_core.schedule.compile import Compiled
from piper_core.schedule.plan import KINDS, Plan


@dataclass(frozen=True, slots=True)
class Task:
    """What an action of compute is: chunks; by name the values that it makes, those of them that others read, and those
    that it reads last (``spent``)."""

    spec: Spec
    outputs: tuple[str, ...]
    kept: frozenset[str]
    spent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """The values of one message, by name; ``spent`` those that nothing reads after a send of it."""

    values: tuple[str, ...]
    spent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective that stands apart: the operator that it is, the names of its arguments (what is no name is given as
    it is) and of its result, those arguments that nothing reads afterwards, and whether it is the chunk's first, with a
    task before it, or the second, with one after it."""

    target: Any
    arguments: tuple[Any, ...]
    result: str
    first: bool
    spent: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.arguments if isinstance(each, Named))


@dataclass(frozen=True, slots=True)
class Named:
    """An argument that is a value."""

    name: str


@dataclass(frozen=True, slots=True)
class RowTable:
    """A row's steps in order, its actions by index in the plan, and the values that its microbatches begin with."""

    row: int
    steps: tuple[Step, ...]
    tasks: Mapping[int, Task]
    messages: Mapping[int, Message]
    meetings: Mapping[int, Meeting]
    given: frozenset[str]


def row_table(compiled: Compiled, macros: Macros, row: int, results: frozenset[str]) -> RowTable:
    """Return what a row does; ``results`` are the values that the caller takes from forwards (losses, counts)."""
    plan, dag = compiled.plan, compiled.dag
    nodes = _nodes_of(plan)
    piece_of = pieces_by_chunk(dag, macros.cut)
    specs, meetings = _apart(compiled, macros, row, nodes, piece_of)
    steps = tuple(flatten(plan, row, meetings))
    messages: dict[int, tuple[str, ...]] = {}
    edges = _Edges(dag)
    for _, action in steps:
        kind = KINDS[int(plan.kind[action])]
        if kind in COMPUTE_KINDS and action not in specs:
            specs[action] = _spec(dag, nodes[action], piece_of)
        elif kind in SENDS + RECVS and action not in messages:
            messages[action] = _values(dag, macros.cut, edges, nodes[action], piece_of, sending=kind in SENDS)
    return _Liveness(plan, macros, steps, specs, messages, meetings, results).table(row)


def _apart(
    compiled: Compiled, macros: Macros, row: int, nodes: list[list[int]], piece_of: tuple[int, ...]
) -> tuple[dict[int, Spec], dict[int, Meeting]]:
    """Return, where the plan has both exchanges of a chunk as actions of their own, the specs of the chunk's three
    parts (before and after belong to the exchanges) and the exchanges."""
    plan, dag = compiled.plan, compiled.dag
    inner: dict[tuple[int, int, bool], list[int]] = {}
    alone: dict[tuple[int, int, bool], tuple[int, Unit]] = {}
    for s, stream in enumerate(plan.streams):
        for action in range(int(plan.start[s]), int(plan.start[s + 1])) if stream.row == row else ():
            kind = KINDS[int(plan.kind[action])]
            if kind not in (*COMPUTE_KINDS, *INNER):
                continue
            places = {
                (int(dag.nodes.chunk[n]), int(plan.microbatch[action]), bool(dag.nodes.phase[n] == Phase.F))
                for n in nodes[action]
            }
            if len(places) != 1:
                continue
            (place,) = places
            if kind in INNER:
                inner.setdefault(place, []).append(action)
            elif len(spec := _spec(dag, nodes[action], piece_of)) == 1 and spec[0].phase is not Phase.BW:
                alone[place] = (action, spec[0])
    specs: dict[int, Spec] = {}
    meetings: dict[int, Meeting] = {}
    for place, (action, unit) in alone.items():
        found = inner.get(place, [])
        made = macros.exchange(unit) if len(found) == 2 else None
        if made is None:
            continue
        for at, node, part in zip(found, (made.first, made.second), (Part.BEFORE, Part.AFTER), strict=True):
            arguments = tuple(Named(each.name) if isinstance(each, Node) else each for each in node.args)
            meetings[at] = Meeting(node.target, arguments, node.name, part is Part.BEFORE)
            specs[at] = (replace(unit, part=part),)
        specs[action] = (replace(unit, part=Part.MIDDLE),)
    return specs, meetings


def pieces_by_chunk(dag: Dag, cut: Cut) -> tuple[int, ...]:
    """Return the piece of the cut that is each chunk of the DAG.

    Raises:
        ConfigError: the DAG is of another model.
    """
    found = {(piece.site.layer, piece.site.region): i for i, piece in enumerate(cut.pieces)}
    names = [(chunk.layer, chunk.region) for chunk in dag.chunks]
    if len(found) != len(cut.pieces) or set(names) != set(found):
        raise ConfigError(
            f"the strategy was compiled for a model of {len(dag.chunks)} chunks, "
            f"{dag.chunks[0].name} to {dag.chunks[-1].name}; this model has {len(cut.pieces)}; compile it for this one"
        )
    return tuple(found[name] for name in names)


def _nodes_of(plan: Plan) -> list[list[int]]:
    """Return the DAG's nodes of each action."""
    found: list[list[int]] = [[] for _ in range(len(plan))]
    for node, action in enumerate(plan.unit.tolist()):
        if action >= 0:
            found[action].append(node)
    return found


def _spec(dag: Dag, members: list[int], piece_of: tuple[int, ...]) -> Spec:
    """Return the chunks of an action in order: forwards by chunk, backwards in reverse, R before its layer's."""
    nodes = dag.nodes
    units = []
    backward = any(nodes.phase[n] in (Phase.B, Phase.BI, Phase.BW) for n in members)
    for n in members:
        if nodes.kind[n] != NodeKind.COMPUTE:
            continue
        chunk, phase = int(nodes.chunk[n]), Phase(int(nodes.phase[n]))
        layer = dag.chunks[chunk].layer
        again = phase is Phase.R
        place = (-layer, not again, chunk if again else -chunk) if backward else (layer, 0, chunk)
        policy = int(nodes.policy[n]) if phase in (Phase.F, Phase.R) else 0
        sends = not again or (chunk + 1 < len(dag.chunks) and dag.chunks[chunk + 1].layer == layer)
        units.append((place, Unit(piece_of[chunk], phase, policy, sends=sends)))
    return tuple(unit for _, unit in sorted(units, key=lambda each: each[0]))


class _Edges:
    """The ends of data edges by node."""

    def __init__(self, dag: Dag) -> None:
        edges = dag.edges
        flows = np.flatnonzero(np.isin(edges.role, (Role.ACTIVATION, Role.GRADIENT, Role.MESSAGE)))
        self.into: dict[int, list[int]] = {}
        self.out: dict[int, list[int]] = {}
        for u, v in zip(edges.src[flows].tolist(), edges.dst[flows].tolist(), strict=True):
            self.into.setdefault(v, []).append(u)
            self.out.setdefault(u, []).append(v)


def _values(
    dag: Dag, cut: Cut, edges: _Edges, members: list[int], piece_of: tuple[int, ...], *, sending: bool
) -> tuple[str, ...]:
    """Return the names of the values that a message carries: what its source makes and its consumers read."""
    nodes = dag.nodes
    (node,) = members
    (send,) = (node,) if sending else edges.into[node]
    (recv,) = edges.out[send]
    (source,) = edges.into[send]
    giver = cut.pieces[piece_of[int(nodes.chunk[source])]]
    takers = [cut.pieces[piece_of[int(nodes.chunk[n])]] for n in edges.out[recv]]
    if nodes.phase[send] == Phase.F:
        read = {value for piece in takers for value in piece.forward.inputs}
        return tuple(value.name for value in giver.sent if value in read)
    read = {value for piece in takers for value in piece.backward.inputs}
    return tuple(value.name for value in giver.backward.outputs if value in read)


def constant_names(cut: Cut) -> frozenset[str]:
    """Return the values that are the same for every microbatch: parameters, buffers, and what is computed from buffers.

    What auxiliary losses weigh is a buffer of the model, but here it is one for each microbatch.
    """
    joint = cut.joint
    weights = {name for name, full in joint.buffers.items() if full.endswith("router.loss_weight")}
    names = {*joint.parameters, *joint.buffers, *(node.name for node in cut.prelude.outputs)}
    return frozenset(names - weights)


class _Liveness:
    """Which values must come out of each action, and which it reads last, along the order of the steps."""

    def __init__(
        self, plan: Plan, macros: Macros, steps: tuple[Step, ...], specs: dict[int, Spec],
        messages: dict[int, tuple[str, ...]], meetings: dict[int, Meeting], results: frozenset[str],
    ) -> None:  # fmt: skip
        self.plan, self.macros, self.steps, self.specs = plan, macros, steps, specs
        self.messages, self.meetings, self.results = messages, meetings, results
        self.constant = constant_names(macros.cut)

    def table(self, row: int) -> RowTable:
        wanted = {spec: {n.name for n in self.macros.draft(spec).outputs} for spec in set(self.specs.values())}
        while True:
            reads = {
                spec: tuple(n.name for n in self.macros.joined(spec, names).inputs if n.name not in self.constant)
                for spec, names in wanted.items()
            }
            needed, found = self._walk(wanted, reads, row)
            if needed == wanted:
                return found
            wanted = needed

    def _walk(
        self, wanted: dict[Spec, set[str]], reads: dict[Spec, tuple[str, ...]], row: int
    ) -> tuple[dict[Spec, set[str]], RowTable]:
        plan = self.plan
        live: dict[int, set[str]] = {}
        needed: dict[Spec, set[str]] = {spec: set() for spec in wanted}
        tasks: dict[int, Task] = {}
        messages: dict[int, Message] = {}
        meetings: dict[int, Meeting] = {}

        def ran(action: int, after: set[str], *, forward: bool) -> None:
            spec = self.specs[action]
            made = wanted[spec] & (after | (self.results if forward else frozenset()))
            needed[spec] |= made
            kept = frozenset(wanted[spec] & after)
            after -= wanted[spec]
            spent = tuple(n for n in reads[spec] if n not in after)
            tasks[action] = Task(spec, tuple(sorted(made)), kept, spent)
            after |= set(reads[spec])

        for do, action in reversed(self.steps):
            kind, after = KINDS[int(plan.kind[action])], live.setdefault(int(plan.microbatch[action]), set())
            if action in self.meetings:
                meeting = self.meetings[action]
                if do is Do.WAIT:
                    if not meeting.first:
                        ran(action, after, forward=False)
                    after.discard(meeting.result)
                else:
                    meetings[action] = replace(meeting, spent=tuple(n for n in meeting.names if n not in after))
                    after |= set(meeting.names)
                    if meeting.first:
                        ran(action, after, forward=False)
            elif action in self.specs:
                ran(action, after, forward=kind is ActionKind.F)
            elif kind in SENDS and do is Do.START:
                values = self.messages[action]
                messages[action] = Message(values, tuple(n for n in values if n not in after))
                after |= set(values)
            elif kind in RECVS and do is Do.WAIT:
                messages[action] = Message(self.messages[action])
                after -= set(self.messages[action])
        given = frozenset(name for names in live.values() for name in names)
        return needed, RowTable(row, self.steps, tasks, messages, meetings, given)
