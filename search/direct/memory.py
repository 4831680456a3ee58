"""Bytes that each row holds along a plan that was built directly: as ``search.cost.memory`` counts them, by pieces."""

from __future__ import annotations

import numpy as np

from piper_core.ir.dag import Floats, Ints
from profiler.spec import Device
from search.cost.memory import OPTIMIZER_BYTES, RESERVED_GAP, Memory, RowMemory
from search.direct.plan import Built
from search.simulator.run import Simulation

PARAMETERS, GRADIENTS, ACTIVATIONS, BUFFERS, WORKSPACE = range(5)


class _Usage:
    """Bytes by cause and instant: the i-th action of a row's compute stream has the instants 3 i (it holds all it
    needs), 3 i + 1 (its results are there), 3 i + 2 (after it)."""

    def __init__(self, built: Built, simulation: Simulation) -> None:
        self.built, self.simulation, self.rank = built, simulation, built.rank
        self.rows = len(built.plan.rows)
        self.first = built.plan.start[: self.rows + 1].astype(np.int64)  # compute streams come first
        self.base = 3 * self.first + np.arange(self.rows + 1)
        self.level = np.zeros((5, int(self.base[-1])))
        self.changes: list[tuple[Ints, Floats]] = []

    def at(self, action: Ints, row: Ints, instant: int) -> Ints:
        """Return the place of an instant of actions of compute streams."""
        return np.asarray(3 * action + row + instant)

    def when(self, row: Ints, time: Floats, *, end: bool) -> Ints:
        """Return the place at which something that starts (or ends) at a time beside the compute stream counts: what
        overlaps an action in part counts during all of it."""
        place = np.empty(len(row), np.int64)
        for r in range(self.rows):
            mine = np.flatnonzero(row == r)
            if not len(mine):
                continue
            low, high = int(self.first[r]), int(self.first[r + 1])
            starts, ends = self.simulation.start_s[low:high], self.simulation.end_s[low:high]
            i = np.searchsorted(starts, time[mine], "left" if end else "right") - 1
            running = ends[np.maximum(i, 0)] > time[mine]
            local = np.where(running, 3 * i + 2, 3 * (i + 1)) if end else np.where(running, 3 * i, 3 * i + 2)
            place[mine] = self.base[r] + np.clip(local, 0, 3 * (high - low))
        return place

    def near(self, action: Ints, row: Ints, *, end: bool) -> Ints:
        """Return the place of the start (or the end) of actions, those beside the compute stream by their times."""
        place = self.at(action, row, 2 if end else 0)
        beside = np.flatnonzero(action >= self.first[-1])
        if len(beside):
            times = self.simulation.end_s if end else self.simulation.start_s
            place[beside] = self.when(row[beside], times[action[beside]], end=end)
        return place

    def during(self, cause: int, start: Ints, end: Ints, size: Floats) -> None:
        """Add what is held from one place to another, no earlier."""
        shift = cause * self.level.shape[1]
        self.changes += [(start + shift, size), (np.maximum(start, end) + shift, -size)]

    # what is held --------------------------------------------------------------------------------------------------

    def pieces(self) -> None:
        """Activations, and what an action holds only while it runs."""
        built, level = self.built, self.level
        table, piece = built.table, built.macros.piece
        computes = np.flatnonzero(table.queue[piece] < 0)
        piece, row = piece[computes], built.order.row[built.macros.macro[computes]]
        start = self.at(self.rank[computes], row, 0)
        level[ACTIVATIONS, start] = table.column("start_bytes")[piece]
        level[ACTIVATIONS, start + 1] = table.column("end_bytes")[piece]
        level[ACTIVATIONS, start + 2] = table.column("late_bytes")[piece]
        workspace = (table.column("workspace") + table.column("recomputed"))[piece]
        gathered = table.column("gathered")[piece]
        for cause, size in ((WORKSPACE, workspace), (BUFFERS, gathered)):
            level[cause, start] = size
            level[cause, start + 2] = -size

    def messages(self) -> None:
        """A receive holds its buffer from when it is posted; a send until it is through."""
        messages, simulation = self.built.messages, self.simulation
        if not len(messages.send):
            return
        source, target = messages.source, messages.target
        sent, received = self.rank[messages.send], self.rank[messages.recv]
        through = self.when(source, simulation.end_s[sent], end=True)
        self.during(BUFFERS, self.near(self.rank[messages.producer], source, end=False), through, messages.bytes)
        user, ahead = self.rank[messages.consumer], messages.forward
        gone = np.empty(len(user), np.int64)
        gone[ahead] = self.near(user[ahead], target[ahead], end=False)
        gone[~ahead] = self.near(user[~ahead], target[~ahead], end=True)
        posted = self.when(target, self.posted()[received], end=False)
        self.during(BUFFERS, posted, gone, messages.bytes)

    def posted(self) -> Floats:
        """Return when each action came to the head of its stream with all its waits done, shape (A,)."""
        plan, end = self.built.plan, self.simulation.end_s
        posted = np.zeros(len(plan))
        posted[1:] = end[:-1]
        posted[plan.start[:-1]] = 0.0
        waiting = np.repeat(np.arange(len(plan)), np.diff(plan.wait_start))
        np.maximum.at(posted, waiting, end[plan.waits])
        return posted

    def buckets(self) -> None:
        """Whole buckets while they are gathered (ZeRO-3), and while they are reduced (ZeRO-2/3)."""
        built, simulation = self.built, self.simulation
        row_of = np.zeros(len(built.plan), np.int64)
        for uses in (built.gathers, built.reductions):
            if len(uses.unit):
                row_of[self.rank[uses.unit]] = self._rows(uses.compute)
        if len(built.gathers.unit):
            gather, free = self.rank[built.gathers.unit], self.rank[built.gathers.compute]
            row = row_of[gather]
            start = self.when(row, simulation.start_s[gather], end=False)
            self.during(PARAMETERS, start, self.at(free, row, 2), built.gathers.bytes)
        if len(built.reductions.unit):
            reduce, began = self.rank[built.reductions.unit], self.rank[built.reductions.compute]
            row = row_of[reduce]
            end = self.when(row, simulation.end_s[reduce], end=True)
            self.during(GRADIENTS, self.at(began, row, 0), end, built.reductions.bytes)

    def _rows(self, units: Ints) -> Ints:
        """Return the row of units on compute streams."""
        return np.asarray(np.searchsorted(self.first, self.rank[units], "right") - 1)

    # levels --------------------------------------------------------------------------------------------------------

    def peaks(self) -> list[tuple[list[float], int]]:
        """Return each row's bytes by cause at its peak, and the action of the plan that reaches it."""
        self.pieces()
        self.messages()
        self.buckets()
        if self.changes:
            place, change = (np.concatenate(side) for side in zip(*self.changes, strict=True))
            self.level += np.bincount(place, weights=change, minlength=self.level.size).reshape(self.level.shape)
        found: list[tuple[list[float], int]] = []
        for r in range(self.rows):
            level = np.cumsum(self.level[:, self.base[r] : self.base[r + 1]], axis=1)
            at = int(level.sum(axis=0).argmax())
            last = (level.shape[1] - 1) // 3 - 1
            found.append((level[:, at].tolist(), int(self.first[r]) + max(0, min(at // 3, last))))
        return found


def static_bytes(built: Built, dtype_bytes: int) -> Floats:
    """Return the bytes of each row's parameters, gradients and optimiser state, shape (rows, 3)."""
    step, zero, software = built.step, built.step.config.zero, built.step.software
    buckets = step.buckets
    rows = [step.rows_of[stage] for stage in buckets.stage.tolist()]
    at = np.asarray([row for some in rows for row in some])
    whole = np.repeat(buckets.numel, [len(some) for some in rows]).astype(np.float64)
    ranks = np.repeat(step.sync.ranks, [len(some) for some in rows])
    share = whole / ranks
    owned = whole / [software.owners(each, zero) for each in ranks.tolist()]
    held = (
        dtype_bytes * (share if zero == 3 else whole),
        software.gradient_width(zero) * (share if zero >= 2 else whole),
        OPTIMIZER_BYTES * owned,
    )
    return np.stack([np.bincount(at, weights=each, minlength=len(step.rows)) for each in held], axis=1)


def memory(built: Built, simulation: Simulation, device: Device, dtype_bytes: int) -> Memory:
    """Return the peak memory of each row of a plan that was built directly and simulated."""
    static = static_bytes(built, dtype_bytes).tolist()
    rows = []
    for row, (levels, at) in enumerate(_Usage(built, simulation).peaks()):
        gathered, transient, activations, buffers, workspace = levels
        parameters, gradients, optimizer = static[row]
        rows.append(
            RowMemory(
                parameters + gathered, gradients + transient, optimizer, activations, buffers, workspace,
                device.context_bytes, RESERVED_GAP * sum(levels), at,
            )
        )  # fmt: skip
    return Memory(tuple(rows), device.memory_bytes)
