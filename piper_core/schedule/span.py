"""How long a grid takes and how many activations it holds, from compute times alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from piper_core.errors import PlanError, ScheduleError
from piper_core.ir.action import KIND_OF_PHASE, PHASE_OF_KIND, Action, format_slots
from piper_core.names import Phase
from piper_core.schedule.grid import Grid

Seconds = Callable[[int, Phase], float] | Mapping[Phase, float] | Mapping[tuple[int, Phase], float]
"""Duration of one action: a function of (stage, phase), or a mapping by phase or by (stage, phase)."""

_KINDS = 5  # phases that compute; an operation is numbered (stage * microbatches + microbatch) * _KINDS + phase
_F, _B, _BI, _BW, _R = int(Phase.F), int(Phase.B), int(Phase.BI), int(Phase.BW), int(Phase.R)
_CODE = {kind: int(phase) for kind, phase in PHASE_OF_KIND.items()}


@dataclass(frozen=True, slots=True)
class Span:
    """When each action of a grid runs. ``start_s[r][i]`` is for action i of row r, overlap groups flattened.

    ``peak_chunks[r]`` counts the (stage, microbatch) whose activations row r holds at once, each from the
    start of its F to the end of its BW (or B); ``peak_microbatches[r]`` weighs them (see :func:`evaluate`).
    """

    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    peak_chunks: tuple[int, ...]
    peak_microbatches: tuple[float, ...]

    @property
    def first_start_s(self) -> tuple[float, ...]:
        """When each row begins its first action (0 for an empty row)."""
        return tuple(row[0] if row else 0.0 for row in self.start_s)

    @property
    def last_end_s(self) -> tuple[float, ...]:
        """When each row ends its last action (0 for an empty row)."""
        return tuple(row[-1] if row else 0.0 for row in self.end_s)

    @property
    def span_s(self) -> float:
        """The longest time from the first start to the last end on one row."""
        rows = zip(self.first_start_s, self.last_end_s, strict=True)
        return max((end - start for start, end in rows), default=0.0)

    @property
    def makespan_s(self) -> float:
        """The time at which the last row ends."""
        return max(self.last_end_s, default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """The idle share of the makespan, mean over rows."""
        total_s = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / total_s if total_s else 0.0

    def times(self, grid: Grid) -> dict[Action, tuple[float, float]]:
        """Return (start, end) of each action of the grid that was evaluated."""
        return {
            action: (start, end)
            for row, starts, ends in zip(grid.rows, self.start_s, self.end_s, strict=True)
            for action, start, end in zip((a for slot in row for a in slot), starts, ends, strict=True)
        }


def evaluate(grid: Grid, seconds: Seconds, *, p2p_s: float = 0.0, weight: float | Mapping[int, float] = 1.0) -> Span:
    """Run every row as early as its order and the data dependencies allow.

    F(s, m) follows F(s-1, m); B or BI (s, m) follows B or BI (s+1, m), F(s, m) and R(s, m) if there is one;
    BW follows BI; ``p2p_s`` is added where the two ends lie on different rows. An overlap group is one unit
    without gain: it begins when what all its members wait for is there, they start in order, and all end
    (and hand on their results) after the sum of their durations. Messages block no compute, so a grid that
    ends here ends under rendezvous too, where each (source, destination, activation | gradient) is a channel
    whose sends follow the order of their consumers.

    Args:
        grid: rows of compute actions; stages and microbatches are counted from what it holds.
        seconds: duration of one action, seconds (or any unit of time).
        p2p_s: time of one message between rows, same unit.
        weight: what the activations of one (stage, microbatch) count in ``peak_microbatches``, one number
            or by stage; 0.5 where a row holds two stages (V layouts), 1 / v with v virtual stages.

    Raises:
        PlanError: ``deadlock`` where rows wait for each other, ``incomplete`` or ``duplicate`` where an F is
            missing or doubled, or (stage, microbatch) has not exactly one of {B} and {BI, BW};
            ``data_dependency`` where F and its backward lie on different rows.
        ScheduleError: the grid holds something that is not compute of one microbatch.
    """
    n_stages, n_microbatches = _extent(grid)
    rows, row_of = _number(grid, n_stages, n_microbatches)
    _check_complete(row_of, n_microbatches)
    duration = _durations(seconds, rows, n_microbatches)

    stride = n_microbatches * _KINDS
    last = stride * (n_stages - 1)
    end_of = [-1.0] * len(row_of)
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    cursor = [0] * len(rows)
    blocked_on = [-1] * len(rows)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(rows) - 1, -1, -1))
    while ready:
        r = ready.pop()
        slots, row_start, row_end, i = rows[r], starts[r], ends[r], cursor[r]
        clock = row_end[-1] if row_end else 0.0
        n = len(slots)
        while i < n:
            slot = slots[i]
            begin, missing = clock, -1
            for op in slot:
                code = op % _KINDS
                base = op - code
                needs: tuple[int, ...] = ()
                if code == _F:
                    if base >= stride:
                        needs = (base - stride,)
                elif code == _BW:
                    needs = (base + _BI,)
                elif code == _R:
                    needs = (base,)
                else:
                    needs = (base,) if row_of[base + _R] < 0 else (base, base + _R)
                    if base < last:
                        above = base + stride
                        needs += (above + _B if row_of[above + _B] >= 0 else above + _BI,)
                for need in needs:
                    done = end_of[need]
                    if done < 0.0:
                        if len(slot) > 1 and need in slot[: slot.index(op)]:
                            continue
                        missing = need
                        break
                    if p2p_s and row_of[need] != r:
                        done += p2p_s
                    if done > begin:
                        begin = done
                if missing >= 0:
                    break
            if missing >= 0:
                blocked_on[r] = missing
                waiting.setdefault(missing, []).append(r)
                break
            clock = begin
            for op in slot:
                row_start.append(clock)
                clock += duration[op // stride * _KINDS + op % _KINDS]
            for op in slot:
                row_end.append(clock)
                end_of[op] = clock
                if waiting and op in waiting:
                    ready += waiting.pop(op)
            i += 1
        cursor[r] = i

    if any(i < len(slots) for i, slots in zip(cursor, rows, strict=True)):
        raise _deadlock(grid, cursor, blocked_on, row_of, n_microbatches)
    busy = tuple(sum(duration[op // stride * _KINDS + op % _KINDS] for slot in slots for op in slot) for slots in rows)
    peaks, weighed = _peaks(rows, stride, n_stages, weight)
    return Span(tuple(map(tuple, starts)), tuple(map(tuple, ends)), busy, peaks, weighed)


def _extent(grid: Grid) -> tuple[int, int]:
    """Return the numbers of stages and microbatches that the grid speaks of."""
    stages, microbatches = 0, 0
    for row in grid.rows:
        for slot in row:
            for action in slot:
                m = action.microbatch
                if m is None or action.kind not in _CODE:
                    raise ScheduleError(
                        "a grid orders compute only",
                        expected="F, B, BI, BW or R of a microbatch",
                        found=str(action),
                    )
                if m >= microbatches:
                    microbatches = m + 1
                if action.stage >= stages:
                    stages = action.stage + 1
    return stages, microbatches


def _number(grid: Grid, n_stages: int, n_microbatches: int) -> tuple[list[list[tuple[int, ...]]], list[int]]:
    """Return the rows as operation numbers, and the row of each operation (-1: absent)."""
    row_of = [-1] * (n_stages * n_microbatches * _KINDS)
    code = _CODE
    rows: list[list[tuple[int, ...]]] = []
    for r, row in enumerate(grid.rows):
        slots: list[tuple[int, ...]] = []
        for slot in row:
            ops = tuple([(a.stage * n_microbatches + cast(int, a.microbatch)) * _KINDS + code[a.kind] for a in slot])
            for op in ops:
                if row_of[op] >= 0:
                    raise PlanError("duplicate", f"{_name(op, n_microbatches)} is there twice")
                row_of[op] = r
            slots.append(ops)
        rows.append(slots)
    return rows, row_of


def _check_complete(row_of: list[int], n_microbatches: int) -> None:
    for base in range(0, len(row_of), _KINDS):
        f, b, bi, bw, _ = row_of[base : base + _KINDS]
        if f < 0:
            raise PlanError("incomplete", f"{_name(base + _F, n_microbatches)} is missing")
        if b >= 0 and (bi >= 0 or bw >= 0):
            extra = _name(base + (_BI if bi >= 0 else _BW), n_microbatches)
            raise PlanError("duplicate", f"{_name(base + _B, n_microbatches)} and {extra} are both there")
        if b < 0 and (bi < 0 or bw < 0):
            lacks = _B if bi < 0 and bw < 0 else _BI if bi < 0 else _BW
            raise PlanError("incomplete", f"{_name(base + lacks, n_microbatches)} is missing")
        if any(row not in (-1, f) for row in row_of[base : base + _KINDS]):
            raise PlanError(
                "data_dependency",
                f"{_name(base, n_microbatches)} is on row {f} and its backward on row {max(b, bi)}",
            )


def _durations(seconds: Seconds, rows: list[list[tuple[int, ...]]], n_microbatches: int) -> list[float]:
    """Return seconds by stage * _KINDS + phase, asking only for what occurs."""
    stride = n_microbatches * _KINDS
    used = {op // stride * _KINDS + op % _KINDS for slots in rows for slot in slots for op in slot}
    table = [0.0] * (max(used, default=-1) + 1)
    for key in used:
        stage, phase = key // _KINDS, Phase(key % _KINDS)
        if callable(seconds):
            table[key] = seconds(stage, phase)
        else:
            by = cast(Mapping[object, float], seconds)
            table[key] = by[(stage, phase)] if (stage, phase) in by else by[phase]
    return table


def _peaks(
    rows: list[list[tuple[int, ...]]], stride: int, n_stages: int, weight: float | Mapping[int, float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the most activations alive on each row, counted and weighed; overlapped actions all count."""
    counts: list[int] = []
    weighed: list[float] = []
    uniform = not isinstance(weight, Mapping)
    for slots in rows:
        alive = peak = 0
        mass = peak_mass = 0.0
        for slot in slots:
            freed, freed_mass = 0, 0.0
            for op in slot:
                code = op % _KINDS
                if code == _F:
                    alive += 1
                    mass += 0.0 if uniform else cast(Mapping[int, float], weight)[op // stride]
                elif code in (_BW, _B):
                    freed += 1
                    freed_mass += 0.0 if uniform else cast(Mapping[int, float], weight)[op // stride]
            peak = max(peak, alive)
            peak_mass = max(peak_mass, mass)
            alive -= freed
            mass -= freed_mass
        counts.append(peak)
        weighed.append(peak * cast(float, weight) if uniform else peak_mass)
    return tuple(counts), tuple(weighed)


def _name(op: int, n_microbatches: int) -> str:
    stage, microbatch = divmod(op // _KINDS, n_microbatches)
    return str(Action(stage, KIND_OF_PHASE[Phase(op % _KINDS)], microbatch))


def _deadlock(grid: Grid, cursor: list[int], blocked_on: list[int], row_of: list[int], m: int) -> PlanError:
    """Name the rows that wait for each other, each with the action it stands at."""
    row = next(r for r, slots in enumerate(grid.rows) if cursor[r] < len(slots))
    seen: list[int] = []
    while row not in seen:
        seen.append(row)
        row = row_of[blocked_on[row]]
    cycle = seen[seen.index(row) :]
    waits = ", ".join(
        f"row {r} waits at {format_slots((grid.rows[r][cursor[r]],))} for {_name(blocked_on[r], m)}" for r in cycle[:4]
    )
    lines = []
    for r in sorted(cycle)[:10]:
        near = grid.rows[r][max(0, cursor[r] - 4) : cursor[r] + 1]
        lines.append(f"{r}: {'... ' if cursor[r] > 4 else ''}{format_slots(near)} <-- here")
    more = f", and {len(cycle) - 4} more rows" if len(cycle) > 4 else ""
    return PlanError("deadlock", waits + more, context="\n".join(lines))
