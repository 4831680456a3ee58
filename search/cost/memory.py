"""Bytes that each row of a plan holds, along its own order of compute.

What does not depend on the schedule: parameters (2 bytes each in compute dtype; a shard of them under ZeRO-3),
gradients (4 bytes each under ZeRO-0/1, a shard of that under ZeRO-2/3), optimiser state (12 bytes for each parameter
that a rank owns: fp32 master weight and two moments), the device's context. What does: activations, from the start of
a forward to the end of its backward (the stash to the end of BW), buckets gathered under ZeRO-3 (from the start of the
gather to the FREE) and reduced under ZeRO-2/3 (in compute dtype, from the first gradient to the end of the reduction),
messages (a receive from when it is posted, a send until it is through), recomputed layers, workspace.

Compute is taken in the plan's order; communication at the times that a simulation gives it, which say how far it runs
beside that order. An action holds at once all that it ever holds (its forward's activations, its transients).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from piper_core.arch.chunk import Saved
from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Dag, Floats, Ints, Policy, among
from piper_core.ir.edit import compute_table, rows
from piper_core.names import Axis, Collective, NodeKind, Phase, Region, Role
from piper_core.schedule.plan import CODE
from profiler.spec import Device
from search.candidate import Verdict
from search.cost.price import buckets_of, owned
from search.cost.software import BLOCKS, OWN, Software
from search.simulator.lower import on_compute, row_of, sums
from search.simulator.run import Simulation

GATHERED = 3.7
"""Bytes of a loss over gathered logits, as a multiple of the 6 that a loss over its own part has in passing: logits as
parts and whole, in 2 and 4 bytes, their softmax and two gradients (fitted to Hagemann 2023's out-of-memory runs)."""
OPTIMIZER_BYTES = 12
"""Adam for each owned parameter: fp32 master weight, first and second moment."""
RESERVED_GAP = 0.05
"""What the caching allocator reserves beyond what is allocated, as a fraction of what comes and goes: activations,
buffers and workspace (blocks that live for the whole run leave no gaps); on a device with room to spare."""
TIGHT_GAPS = 0.1, 0.4
"""The same on a full device: what runs loses no less, and what runs out of memory no more (fitted to 250 runs of
Hagemann 2023, of which 128 ran out of memory). Between the two the verdict is "close"."""
USABLE = 0.98
"""Part of the capacity that a process gets: the driver, and libraries beside torch, hold the rest."""

_CAUSES = ("parameters", "gradients", "activations", "buffers", "workspace")
_PARAMETERS, _GRADIENTS, _ACTIVATIONS, _BUFFERS, _WORKSPACE = range(5)


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Bytes of one rank of a row at its peak, by cause, and the action of the plan at which the peak is reached.

    ``buffers`` are messages and the tensors that inner collectives gather; ``workspace`` is the largest transient of
    a kernel, and the layer that is being recomputed.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    workspace: float
    context: float
    reserved_gap: float
    peak_at: int

    @property
    def peak(self) -> float:
        """All causes together."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.workspace
            + self.context + self.reserved_gap
        )  # fmt: skip

    def with_gap(self, gap: float) -> float:
        """Return the peak if the allocator lost ``gap`` of what comes and goes."""
        return self.peak - self.reserved_gap * (1 - gap / RESERVED_GAP)

    def breakdown(self) -> dict[str, float]:
        """Return the bytes by cause."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "peak_at"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks by row, against what the device has."""

    rows: tuple[RowMemory, ...]
    capacity: float

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peak bytes of each row."""
        return tuple(row.peak for row in self.rows)

    @property
    def worst(self) -> int:
        """The row with the highest peak."""
        return max(range(len(self.rows)), key=lambda r: (self.rows[r].peak, -r))

    @property
    def margin_bytes(self) -> float:
        """What the worst row leaves free; negative where it does not fit."""
        return self.capacity - max(self.peaks, default=0.0)

    @property
    def fits(self) -> Verdict:
        """``yes`` where every row has room for the larger of ``TIGHT_GAPS``, ``no`` where one has none for the smaller,
        ``close`` in between."""
        least, most = (max((row.with_gap(gap) for row in self.rows), default=0.0) for gap in TIGHT_GAPS)
        if least > USABLE * self.capacity:
            return "no"
        return "yes" if most <= USABLE * self.capacity else "close"


def memory(dag: Dag, simulation: Simulation, device: Device, software: Software = OWN) -> Memory:
    """Return the peak memory of each row of the plan that was lowered from ``dag`` and simulated."""
    usage = _Usage(dag, simulation, software)
    usage.collect()
    static = usage.static()
    peaks = []
    for row, (levels, at) in enumerate(usage.peaks()):
        gathered, transient, activations, buffers, workspace = levels
        parameters, gradients, optimizer = static[row]
        gap = RESERVED_GAP * sum(levels)
        peaks.append(
            RowMemory(
                parameters + gathered, gradients + transient, optimizer, activations, buffers, workspace,
                device.context_bytes, gap, at,
            )
        )  # fmt: skip
    return Memory(tuple(peaks), device.memory_bytes)


def levels(dag: Dag, simulation: Simulation) -> tuple[NDArray[np.float64], ...]:
    """Return, for each row, what comes and goes over one step: bytes by cause and instant, shape (5, 3 n + 1).

    Causes are gathered parameters, gradients in passing, activations, buffers, workspace; the i-th of n actions of the
    compute stream has the instants 3 i (it holds all it needs), 3 i + 1 (its results are there), 3 i + 2 (after it).
    """
    usage = _Usage(dag, simulation, OWN)
    usage.collect()
    return usage.levels()


class _Usage:
    """Changes of memory, by row, cause and instant (see :func:`levels`)."""

    def __init__(self, dag: Dag, simulation: Simulation, software: Software) -> None:
        self.dag, self.simulation, self.plan, self.software = dag, simulation, simulation.plan, software
        plan, nodes = self.plan, dag.nodes
        self.row, self.on_compute = row_of(plan), on_compute(plan)
        self.compute = [plan.compute_stream(row) for row in range(len(plan.rows))]
        counts = np.asarray([int(plan.start[s + 1] - plan.start[s]) for s in self.compute])
        self.first = plan.start[self.compute].astype(np.int64)
        self.width = 3 * counts + 1
        self.base = np.concatenate([[0], np.cumsum(self.width)])
        self.changes: list[tuple[int, NDArray[np.int64], Floats]] = []
        self.state = nodes.state
        context = np.asarray([s.context_degree for s in dag.states], np.float64)[self.state]
        self.tensor = np.asarray([s.tensor_degree for s in dag.states], np.float64)[self.state]
        self.sequence = np.asarray([s.tensor_degree if s.sequence else 1 for s in dag.states], np.float64)[self.state]
        self.share = dag.sequences() / context
        self.unit = plan.unit.astype(np.int64)
        self.bytes = dag.nbytes()

    # instants ------------------------------------------------------------------------------------------------------

    def at(self, action: NDArray[np.int64], instant: int) -> NDArray[np.int64]:
        """Return the place of an instant (0 to 3) of actions of compute streams in all rows' changes together."""
        row = self.row[action]
        return np.asarray(self.base[row] + 3 * (action - self.first[row]) + instant)

    def when(self, row: Ints, time: Floats, *, end: bool) -> NDArray[np.int64]:
        """Return the place at which something that starts (or ends) at a time beside the compute stream counts.

        What overlaps an action in part counts during all of it.
        """
        place = np.empty(len(row), np.int64)
        start_s, end_s = self.simulation.start_s, self.simulation.end_s
        for r, stream in enumerate(self.compute):
            mine = np.flatnonzero(row == r)
            if not len(mine):
                continue
            low, high = int(self.plan.start[stream]), int(self.plan.start[stream + 1])
            starts, ends, t = start_s[low:high], end_s[low:high], time[mine]
            if end:  # through before the next action, or after the one that is running
                i = np.searchsorted(starts, t, "left") - 1
                running = ends[np.maximum(i, 0)] > t
                local = np.where(running, 3 * i + 2, 3 * (i + 1))
            else:
                i = np.searchsorted(starts, t, "right") - 1
                running = ends[np.maximum(i, 0)] > t
                local = np.where(running, 3 * i, 3 * i + 2)
            place[mine] = self.base[r] + np.clip(local, 0, self.width[r] - 1)
        return place

    def near(self, action: NDArray[np.int64], *, end: bool) -> NDArray[np.int64]:
        """Return the place of the start (or the end) of actions, those beside the compute stream by their times."""
        place = self.at(action, 2 if end else 0)
        beside = np.flatnonzero(~self.on_compute[action])
        if len(beside):
            times, those = self.simulation.end_s if end else self.simulation.start_s, action[beside]
            place[beside] = self.when(self.row[those], times[those], end=end)
        return place

    def change(self, cause: int, place: NDArray[np.int64], size: Floats) -> None:
        self.changes.append((cause, place, size))

    def during(self, cause: int, start: NDArray[np.int64], end: NDArray[np.int64], size: Floats) -> None:
        """Add what is held from one place to another, no earlier."""
        self.change(cause, start, size)
        self.change(cause, np.maximum(start, end), -size)

    def transient(self, cause: int, nodes: Ints, size: Floats) -> None:
        """Add what an action holds only while it runs: the most that one of its nodes needs."""
        most = np.zeros(len(self.plan))
        np.maximum.at(most, self.unit[nodes], size)
        actions = np.flatnonzero((most > 0) & self.on_compute)
        self.during(cause, self.at(actions, 0), self.at(actions, 2), most[actions])

    # what is held --------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Find every change."""
        self.activations()
        self.workspace()
        self.messages()
        self.buckets()

    def size(self, node: Ints, what: str) -> Floats:
        """Return the bytes that a chunk's ``Saved`` field takes on one rank, for compute nodes."""
        saved: list[Saved] = [getattr(chunk, what) for chunk in self.dag.chunks]
        sharded = np.asarray([s.sharded for s in saved])[self.dag.nodes.chunk[node]]
        replicated = np.asarray([s.replicated for s in saved])[self.dag.nodes.chunk[node]]
        return np.asarray((sharded / self.tensor[node] + replicated / self.sequence[node]) * self.share[node])

    def gathered(self, node: Ints) -> Floats:
        """Return what compute nodes keep of a gathered input beyond their part of it, where the program keeps it."""
        if not self.software.keeps_gathered:
            return np.zeros(len(node))
        chunks = self.dag.chunks
        whole = np.asarray([c.hidden_bytes if c.region in (*BLOCKS, Region.HEAD) else 0.0 for c in chunks])
        return np.asarray(whole[self.dag.nodes.chunk[node]] * (1 - 1 / self.sequence[node]) * self.share[node])

    def activations(self) -> None:
        """From F to the end of B; with BI and BW, the stash alone from BI to BW; recomputed ones from R."""
        table = compute_table(self.dag).reshape(5, -1)
        forward = table[Phase.F]
        have = forward >= 0
        table = table[:, have]
        f, b, bi, bw, r = table
        policy = self.dag.nodes.policy[f]
        saved = self.size(f, "saved") + self.gathered(f)
        selective, full = self.size(f, "saved_selective"), self.size(f, "saved_full")
        held = np.select(
            [policy == Policy.SELECTIVE, policy == Policy.FULL, policy == Policy.FULL_INNER],
            [selective, full, np.zeros(len(f))], saved,
        )  # fmt: skip
        split = bi >= 0
        back = np.where(split, bi, b)
        lasting = np.where(split, self.size(f, "stash"), 0.0)
        apart = (r >= 0) & (self.unit[r] != self.unit[back])
        self.change(_ACTIVATIONS, self.at(self.unit[f], 0), held)
        self.change(_ACTIVATIONS, self.at(self.unit[r[apart]], 0), (saved - held)[apart])
        total = np.where(apart, saved, held)
        self.change(_ACTIVATIONS, self.at(self.unit[back], 1), lasting - total)
        self.change(_ACTIVATIONS, self.at(self.unit[bw[split]], 2), -lasting[split])
        self._recomputed(f, back, np.where((r >= 0) & ~apart, saved - held, 0.0))

    def _recomputed(self, forward: Ints, back: Ints, extra: Floats) -> None:
        """One layer at a time is whole again inside the backward that recomputes it."""
        some = np.flatnonzero(extra > 0)
        if not len(some):
            return
        layer = self.dag.chunk_tag("LAYER")[self.dag.nodes.chunk[forward[some]]].astype(np.int64)
        key = self.unit[back[some]] * (int(layer.max()) + 2) + layer + 1
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        self.transient(_WORKSPACE, back[some[first]], sums(inverse, extra[some], len(first)))

    def workspace(self) -> None:
        """The largest transient of a backward; what sequence, expert and context collectives gather."""
        nodes = self.dag.nodes
        back = np.flatnonzero(self.dag.compute & among(nodes.phase, (Phase.B, Phase.BI)))
        each = np.asarray([chunk.workspace_bytes for chunk in self.dag.chunks])[nodes.chunk[back]]
        divided = each / self.tensor[back]
        if self.software.gathers_logits:
            head = np.asarray([chunk.region is Region.HEAD for chunk in self.dag.chunks])[nodes.chunk[back]]
            divided = np.where(head & (self.tensor[back] > 1), each * GATHERED, divided)
        self.transient(_WORKSPACE, back, divided * self.share[back])
        inner = np.flatnonzero(
            (nodes.kind == NodeKind.COLLECTIVE) & (nodes.bucket < 0) & (nodes.collective != Collective.ALL_REDUCE)
            & (nodes.chunk >= 0)
        )  # fmt: skip
        if len(inner):
            self.transient(_BUFFERS, inner, self.bytes[inner])

    def messages(self) -> None:
        """A receive holds its buffer from when it is posted; a send until it is through."""
        edges, simulation = self.dag.edges, self.simulation
        message = np.flatnonzero(edges.role == Role.MESSAGE)
        if not len(message):
            return
        send, recv = edges.src[message], edges.dst[message]
        size = self.bytes[send]
        producer, consumer = self._ends(send, recv)
        forward = self.dag.nodes.phase[recv] == Phase.F
        sent, received = self.unit[send], self.unit[recv]
        through = self.when(self.row[sent], simulation.end_s[sent], end=True)
        self.during(_BUFFERS, self.near(self.unit[producer], end=False), through, size)
        # an activation becomes part of what its consumer saves; a gradient is dead after it
        user = self.unit[consumer]
        gone = np.where(forward, self.near(user, end=False), self.near(user, end=True))
        self.during(_BUFFERS, self.when(self.row[received], self._posted()[received], end=False), gone, size)

    def _ends(self, send: Ints, recv: Ints) -> tuple[Ints, Ints]:
        """Return a node that makes what each send carries, and the first that uses what each receive brings."""
        edges, nodes = self.dag.edges, self.dag.nodes
        into = np.flatnonzero(nodes.kind[edges.dst] == NodeKind.SEND)
        out = np.flatnonzero(nodes.kind[edges.src] == NodeKind.RECV)
        producer = np.full(len(nodes), -1, np.int32)
        consumer = np.full(len(nodes), -1, np.int32)
        producer[edges.dst[into]] = edges.src[into]
        by = np.argsort(-self.unit[edges.dst[out]], kind="stable")
        consumer[edges.src[out][by]] = edges.dst[out][by]
        return producer[send], consumer[recv]

    def _posted(self) -> Floats:
        """Return when each action came to the head of its stream with all its waits done, shape (A,)."""
        plan, end = self.plan, self.simulation.end_s
        posted = np.zeros(len(plan))
        follows = np.ones(len(plan) + 1, np.bool_)
        follows[plan.start] = False
        later = np.flatnonzero(follows[: len(plan)])
        posted[later] = end[later - 1]
        waiting = np.repeat(np.arange(len(plan)), np.diff(plan.wait_start))
        np.maximum.at(posted, waiting, end[plan.waits])
        return posted

    def buckets(self) -> None:
        """Whole buckets while they are gathered (ZeRO-3), and while they are reduced (ZeRO-2/3)."""
        dag, plan, nodes = self.dag, self.plan, self.dag.nodes
        each = (nodes.kind == NodeKind.COLLECTIVE) & (nodes.axis == Axis.DATA) & (nodes.microbatch >= 0)
        gather = np.flatnonzero(each & (nodes.collective == Collective.ALL_GATHER))
        if len(gather):
            action = self.unit[gather]
            freed = np.flatnonzero(plan.kind == CODE[ActionKind.FREE])
            # a row frees a bucket as often as it gathers it, for each microbatch in the same order
            by = action[np.lexsort((action, plan.microbatch[action], plan.bucket[action], self.row[action]))]
            free = freed[np.lexsort((freed, plan.microbatch[freed], plan.bucket[freed], self.row[freed]))].astype(
                np.int64
            )
            size = np.zeros(len(plan))
            size[action] = self.bytes[gather]
            start = self.when(self.row[by], self.simulation.start_s[by], end=False)
            self.during(_PARAMETERS, start, self.at(free, 2), size[by])
        reduce = np.flatnonzero(each & (nodes.phase == Phase.BW) & (nodes.collective == Collective.REDUCE_SCATTER))
        if len(reduce):
            edge = np.flatnonzero((dag.edges.role == Role.REDUCTION) & np.isin(dag.edges.dst, reduce))
            began = np.full(len(nodes), np.iinfo(np.int64).max)
            np.minimum.at(began, dag.edges.dst[edge], self.unit[dag.edges.src[edge]])
            done = self.unit[reduce]
            end = self.when(self.row[done], self.simulation.end_s[done], end=True)
            self.during(_GRADIENTS, self.at(began[reduce], 0), end, self.bytes[reduce])

    def static(self) -> list[tuple[float, float, float]]:
        """Return the bytes of each row's parameters, gradients and optimiser state that stay for the whole run."""
        dag, totals = self.dag, np.zeros((len(self.plan.rows), 3))
        order = rows(dag)
        row_of = {group: i for i, group in enumerate(order)}
        for bucket in buckets_of(dag):
            zero = dag.states[bucket.state].zero_stage
            whole, share = float(bucket.numel), bucket.numel / bucket.ranks
            held = (
                dag.dtype_bytes * (share if zero == 3 else whole),
                self.software.gradient_width(zero) * (share if zero >= 2 else whole),
                OPTIMIZER_BYTES * owned(dag, bucket, self.software),
            )
            for group in bucket.rows:
                totals[row_of[group]] += held
        return [(a, b, c) for a, b, c in totals.tolist()]

    # levels --------------------------------------------------------------------------------------------------------

    def levels(self) -> tuple[NDArray[np.float64], ...]:
        """Return the bytes by cause and instant of each row."""
        size = int(self.base[-1])
        place = np.concatenate([cause * size + where for cause, where, _ in self.changes])
        change = sums(place, np.concatenate([weight for *_, weight in self.changes]), len(_CAUSES) * size).reshape(
            len(_CAUSES), size
        )
        return tuple(np.cumsum(change[:, self.base[r] : self.base[r + 1]], axis=1) for r in range(len(self.plan.rows)))

    def peaks(self) -> list[tuple[list[float], int]]:
        """Return each row's bytes by cause at its peak, and the action of the plan that reaches it."""
        found: list[tuple[list[float], int]] = []
        for row, level in enumerate(self.levels()):
            at = int(level.sum(axis=0).argmax())
            last = (len(level[0]) - 1) // 3 - 1
            found.append((level[:, at].tolist(), int(self.first[row]) + max(0, min(at // 3, last))))
        return found
