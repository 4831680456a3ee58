"""Measured steps beside what was predicted of them, and what the residual model had learnt by then.

Every row is judged by the runs before it alone, as a search would have been at the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from profiler import console
from profiler.record import Profile, Run, Sample
from profiler.residual import Residual
from profiler.store import add, load
from search.candidate import Score
from search.profiled import features


@dataclass(frozen=True, slots=True)
class Row:
    """One measured step; ``recalibrated_s`` with ends is by the runs before it."""

    when: str
    strategy: str
    measured_s: float
    predicted_s: float
    recalibrated_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def error_after(self) -> float:
        return self.recalibrated_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True)
class History:
    """The runs of one profile over time, and the residual model of all of them."""

    path: str
    model: str
    machine: str
    rows: tuple[Row, ...]
    residual: Residual

    def to_data(self) -> dict[str, Any]:
        """Return the JSON form."""
        rows = [asdict(row) | {"error": row.error, "error_after": row.error_after} for row in self.rows]
        about = {"profile": self.path, "model": self.model, "machine": self.machine}
        return {**about, "rows": rows, "residual": self.residual.to_data()}


def history(path: Path) -> History:
    """Return the history in a profile.

    Raises:
        ConfigError: not a profile.
    """
    profile = load(path)
    runs = sorted(profile.runs, key=lambda run: run.when)
    rows = []
    for i, run in enumerate(runs):
        seconds, low, high = Residual.of(runs[:i]).apply(run.predicted_s, run.features)
        rows.append(Row(run.when, run.strategy, run.step.median_s, run.predicted_s, seconds, low, high))
    return History(str(path), profile.model, str(profile.machine), tuple(rows), Residual.of(runs))


def lines(found: History) -> list[str]:
    """Return a history as a table and a summary."""
    if not found.rows:
        return [f"{found.model} on {found.machine}: no measured run"]
    rows = [
        (row.when, row.strategy, f"{row.measured_s * 1e3:.2f}", f"{row.predicted_s * 1e3:.2f}", f"{row.error:+.1%}",
         f"{row.recalibrated_s * 1e3:.2f}", f"{row.low_s * 1e3:.2f} to {row.high_s * 1e3:.2f}",
         f"{row.error_after:+.1%}")
        for row in found.rows
    ]  # fmt: skip
    header = ("when", "strategy", "measured ms", "predicted", "error", "recalibrated", "90 %", "error")
    weights = ", ".join(f"{name} {value:+.3f}" for name, value in found.residual.to_data().items())
    inside = sum(row.inside for row in found.rows)
    return [
        f"{found.model} on {found.machine}",
        console.table(header, rows),
        f"mean error {fmean(abs(r.error) for r in found.rows):.1%} as predicted, "
        f"{fmean(abs(r.error_after) for r in found.rows):.1%} recalibrated by the runs before; "
        f"{inside} of {len(found.rows)} inside their intervals",
        f"residual, logarithms: {weights}",
    ]


def keep_run(
    path: Path, profile: Profile, strategy: str, digest: str, step: Sample, score: Score, when: str = ""
) -> Profile:
    """Add a measured step to a profile on disk, and return it with that.

    ``score`` is what the profile predicts of the strategy, ``digest`` names its directives.

    Raises:
        ConfigError: as :func:`profiler.store.add`.
    """
    now = when or datetime.now(UTC).isoformat(timespec="microseconds")
    run = Run(strategy, digest, now, step, score.step_time_s, features(score))
    bare = replace(profile, chunks={}, sites={}, transfers=(), updates=(), overlaps=(), dispatch=None, conditions=())
    return add(replace(bare, runs=(run,)), path)
