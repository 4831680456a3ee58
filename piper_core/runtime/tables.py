"""What one row does, from the compiled DAG and plan: the same for all ranks of the row.

Streams become one list of steps that one thread can run. Compute keeps its order. What communicates *starts* as soon as
all compute that it waits for has run, in the order of its stream, and is *waited for* just before the first compute
that needs it. Where communication waits for communication (a reduction for that of a tied parameter, the norm for the
reductions), it starts as late as it can, before whatever waits for it; the plan has put these at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from piper_core.errors import ConfigError
from piper_core.frontend.cut import Cut
from piper_core.ir.action import COMPUTE_KINDS, ActionKind
from piper_core.ir.dag import Dag
from piper_core.names import NodeKind, Phase, Role
from piper_core.runtime.graphs import Macros, Spec, Unit
from piper_core.schedule.compile import Compiled
from piper_core.schedule.plan import KINDS, Plan, StreamKind

SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
RECVS = (ActionKind.RECV_F, ActionKind.RECV_B)
INNER = (ActionKind.ALL_TO_ALL_F, ActionKind.ALL_TO_ALL_B, ActionKind.COMM_F, ActionKind.COMM_B)
"""Collectives inside chunks: the graphs run them, so that as actions of their own they are over at once."""


class Do(Enum):
    """What a step does with its action: run it, start it, or wait until it is over."""

    RUN = auto()
    START = auto()
    WAIT = auto()


Step = tuple[Do, int]


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
class RowTable:
    """A row's steps in order, its actions by index in the plan, and the values that its microbatches begin with."""

    row: int
    steps: tuple[Step, ...]
    tasks: Mapping[int, Task]
    messages: Mapping[int, Message]
    given: frozenset[str]


def row_table(compiled: Compiled, macros: Macros, row: int, results: frozenset[str]) -> RowTable:
    """Return what a row does; ``results`` are the values that the caller takes from forwards (losses, counts)."""
    plan, dag = compiled.plan, compiled.dag
    steps = tuple(flatten(plan, row))
    nodes = _nodes_of(plan)
    piece_of = pieces_by_chunk(dag, macros.cut)
    specs: dict[int, Spec] = {}
    messages: dict[int, tuple[str, ...]] = {}
    edges = _Edges(dag)
    for _, action in steps:
        kind = KINDS[int(plan.kind[action])]
        if kind in COMPUTE_KINDS and action not in specs:
            specs[action] = _spec(dag, nodes[action], piece_of)
        elif kind in SENDS + RECVS and action not in messages:
            messages[action] = _values(dag, macros.cut, edges, nodes[action], piece_of, sending=kind in SENDS)
    return _Liveness(plan, macros, steps, specs, messages, results).table(row)


def flatten(plan: Plan, row: int) -> Iterator[Step]:
    """Yield the steps of a row, see the module's docstring."""
    streams = [i for i, stream in enumerate(plan.streams) if stream.row == row]
    (compute,) = (i for i in streams if plan.streams[i].kind is StreamKind.COMPUTE)
    stream_of = plan.stream_of().tolist()
    start, wait_start, waits = plan.start.tolist(), plan.wait_start.tolist(), plan.waits.tolist()
    heads = {s: start[s] for s in streams if s != compute}
    waited = {s: start[s] for s in streams if s != compute}  # actions before it have been waited for
    ran = start[compute]

    inner = {s for s in heads if any(KINDS[k] in INNER for k in plan.kind[start[s] : start[s + 1]].tolist())}

    def over(action: int) -> bool:
        """Say whether an action is over by now, whatever other rows do."""
        s = stream_of[action]
        return action < ran if s == compute else s in inner and action < heads[s]

    def begin() -> Iterator[Step]:
        more = True
        while more:
            more = False
            for s in heads:
                while heads[s] < start[s + 1] and all(
                    map(over, waits[wait_start[heads[s]] : wait_start[heads[s] + 1]])
                ):
                    yield Do.START, heads[s]
                    heads[s] += 1
                    more = bool(inner)

    def finish(action: int) -> Iterator[Step]:
        """Wait for an action on another stream and all before it there, having started what was left for late."""
        s = stream_of[action]
        while heads[s] <= action:
            head = heads[s]
            for w in waits[wait_start[head] : wait_start[head + 1]]:
                if stream_of[w] != compute:
                    yield from finish(w)
                else:
                    assert w < ran, "a verified plan has no cycle"
            yield Do.START, head
            heads[s] += 1
        while waited[s] <= action:
            yield Do.WAIT, waited[s]
            waited[s] += 1

    yield from begin()
    for action in range(start[compute], start[compute + 1]):
        for w in waits[wait_start[action] : wait_start[action + 1]]:
            yield from finish(w)
        yield Do.RUN, action
        ran = action + 1
        yield from begin()
    for s in heads:
        if start[s + 1] > start[s]:
            yield from finish(start[s + 1] - 1)


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
        units.append((place, Unit(piece_of[chunk], phase, int(nodes.policy[n]) if phase in (Phase.F, Phase.R) else 0)))
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
        messages: dict[int, tuple[str, ...]], results: frozenset[str],
    ) -> None:  # fmt: skip
        self.plan, self.macros, self.steps, self.specs = plan, macros, steps, specs
        self.messages, self.results = messages, results
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
        for do, action in reversed(self.steps):
            kind, after = KINDS[int(plan.kind[action])], live.setdefault(int(plan.microbatch[action]), set())
            if action in self.specs:
                spec = self.specs[action]
                forward = kind is ActionKind.F
                made = wanted[spec] & (after | (self.results if forward else frozenset()))
                needed[spec] |= made
                kept = frozenset(wanted[spec] & after)
                after -= wanted[spec]
                spent = tuple(n for n in reads[spec] if n not in after)
                tasks[action] = Task(spec, tuple(sorted(made)), kept, spent)
                after |= set(reads[spec])
            elif kind in SENDS and do is Do.START:
                values = self.messages[action]
                messages[action] = Message(values, tuple(n for n in values if n not in after))
                after |= set(values)
            elif kind in RECVS and do is Do.WAIT:
                messages[action] = Message(self.messages[action])
                after -= set(self.messages[action])
        given = frozenset(name for names in live.values() for name in names)
        return needed, RowTable(row, self.steps, tasks, messages, given)
