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
        self.form, self.step, self.simulation, self.rank = built.form, built.step, simulation, built.form.rank
        self.plan, self.contents = built.plan, built.contents
        self.rows = len(self.plan.rows)
        self.first = self.plan.start[: self.rows + 1].astype(np.int64)  # compute streams come first
        self.base = 3 * self.first + np.arange(self.rows + 1)
        alone = not (len(self.form.gathers.unit) or len(self.form.reductions.unit))
        self.causes = range(ACTIVATIONS if alone else PARAMETERS, 5)
        self.level = np.zeros((len(self.causes), int(self.base[-1])))
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
            place[mine] = self.base[r] + np.maximum(local, 0)
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
        shift = self.causes.index(cause) * self.level.shape[1]
        self.changes += [(start + shift, size), (np.maximum(start, end) + shift, -size)]

    # what is held --------------------------------------------------------------------------------------------------

    def pieces(self) -> None:
        """Activations, and what an action holds only while it runs."""
        held, level = self.contents, self.level
        piece, start = self.form.piece, self.form.instant
        activations = level[self.causes.index(ACTIVATIONS)]
        activations[start] = held.start_bytes[piece]
        activations[start + 1] = held.end_bytes[piece]
        activations[start + 2] = held.late_bytes[piece]
        workspace = (held.workspace + held.recomputed)[piece]
        gathered = held.gathered[piece]
        for cause, size in ((WORKSPACE, workspace), (BUFFERS, gathered)):
            level[self.causes.index(cause), start] = size
            level[self.causes.index(cause), start + 2] = -size

    def messages(self) -> None:
        """A receive holds its buffer from when it is posted; a send until it is through."""
        messages, simulation = self.form.messages, self.simulation
        if not len(messages.send):
            return
        source, target = messages.source, messages.target
        sizes = self.step.message_bytes[messages.boundary]
        sent, received = self.rank[messages.send], self.rank[messages.recv]
        through = self.when(source, simulation.end_s[sent], end=True)
        self.during(BUFFERS, self.near(self.rank[messages.producer], source, end=False), through, sizes)
        user, ahead = self.rank[messages.consumer], messages.forward
        gone = np.empty(len(user), np.int64)
        gone[ahead] = self.near(user[ahead], target[ahead], end=False)
        gone[~ahead] = self.near(user[~ahead], target[~ahead], end=True)
        posted = self.when(target, self.posted()[received], end=False)
        self.during(BUFFERS, posted, gone, sizes)

    def posted(self) -> Floats:
        """Return when each action came to the head of its stream with all its waits done, shape (A,)."""
        plan, end = self.plan, self.simulation.end_s
        posted = np.zeros(len(plan))
        posted[1:] = end[:-1]
        posted[plan.start[:-1]] = 0.0
        waiting = np.repeat(np.arange(len(plan)), np.diff(plan.wait_start))
        np.maximum.at(posted, waiting, end[plan.waits])
        return posted

    def buckets(self) -> None:
        """Whole buckets while they are gathered (ZeRO-3), and while they are reduced (ZeRO-2/3)."""
        simulation, sync = self.simulation, self.step.sync
        gathers, reductions = self.form.gathers, self.form.reductions
        if len(gathers.unit):
            gather, free, row = self.rank[gathers.unit], self.rank[gathers.compute], self._rows(gathers.compute)
            start = self.when(row, simulation.start_s[gather], end=False)
            self.during(PARAMETERS, start, self.at(free, row, 2), sync.gather_bytes[gathers.bucket])
        if len(reductions.unit):
            reduce, began = self.rank[reductions.unit], self.rank[reductions.compute]
            row = self._rows(reductions.compute)
            end = self.when(row, simulation.end_s[reduce], end=True)
            self.during(GRADIENTS, self.at(began, row, 0), end, sync.reduce_bytes[reductions.bucket])

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
            held = [0.0] * self.causes[0] + level[:, at].tolist()
            found.append((held, int(self.first[r]) + max(0, min(at // 3, last))))
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
