"""Memory of each row over one step, from what the memory model says comes and goes along its order of compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from search.cost.memory import levels

if TYPE_CHECKING:
    from search.predict import Prediction


def memory_over_time(made: Prediction) -> list[list[tuple[float, float]]]:
    """Return (seconds, bytes) by row: the level from then on, the peak of a row as the score says it.

    The allocator's gap is spread over the levels in the proportion that it has at the peak.
    """
    plan, simulation = made.compiled.plan, made.simulation
    start, end = simulation.start_s.tolist(), simulation.end_s.tolist()
    found = []
    for row, level in enumerate(levels(made.compiled.dag, simulation)):
        used, known = level.sum(axis=0), made.memory.rows[row]
        most = float(used.max(initial=0.0))
        gap = 1.0 + (known.reserved_gap / most if most else 0.0)
        base = known.peak - most * gap
        first = int(plan.start[plan.compute_stream(row)])
        points: list[tuple[float, float]] = []
        for instant, size in enumerate(used.tolist()):
            action, phase = divmod(instant, 3)
            last = min(first + action, len(end) - 1)
            at = (start if phase == 0 and instant < len(used) - 1 else end)[
                last if instant < len(used) - 1 else last - 1
            ]
            value = base + gap * size
            if points and points[-1][0] == at:
                points[-1] = (at, max(points[-1][1], value) if phase != 2 else value)
            elif not points or points[-1][1] != value:
                points.append((at, value))
        found.append(points)
    return found
