"""Measured steps beside what was predicted of them, and what the residual model had learnt by then.

Every row is judged by the runs before it alone, as a search would have been at the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from piper_core.arch.record import Architecture
from piper_core.directives import RecomputeDirective, Replicate
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy
from profiler import console
from profiler.fingerprint import machine
from profiler.record import Profile, Run, Sample
from profiler.residual import Residual
from profiler.store import add, find
from search.candidate import Score
from search.pricing import Pricing
from search.profiled import features, threads_of


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


def history(path: Path, profile: Profile) -> History:
    """Return the history in a profile, which was read from ``path``."""
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


def profile_of(strategy: Strategy, architecture: Architecture, device: str, dtype: str) -> Path | None:
    """Return the store's profile of a model on this machine as a strategy runs here: None where there is none."""
    ranks = strategy.header.world.size if strategy.header.world else 1
    return find(architecture, machine(device, threads_of(ranks) if device == "cpu" else 1), dtype)


def remember(strategy: Strategy, path: Path, step: Sample) -> None:
    """Add a measured step to a profile of this machine, beside what that predicts of it.

    Raises:
        ConfigError: as :func:`profiler.store.add`; the profile is of another model.
    """
    pricing = Pricing.of(path)
    score = pricing.price(strategy).found.score
    keep_run(path, pricing.profile, short(strategy), digest_of(strategy.program), step, score)


def short(strategy: Strategy) -> str:
    """Return what tells a strategy from most others, in a few words."""
    header, directives = strategy.header, strategy.program.directives
    words = [f"{name}{size}" for name, size in (header.mesh.axes if header.mesh else ()) if size > 1]
    words += [header.schedule or "", f"b{header.micro_batch}" if header.micro_batch else ""]
    replicas = [each for each in directives if isinstance(each, Replicate)]
    zero = max((_zero(each) for each in replicas), default=0)
    again = any(isinstance(each, RecomputeDirective) for each in directives)
    words += [f"zero{zero}" if zero else "", "recompute" if again else ""]
    return " ".join(word for word in words if word) or "one rank"


def _zero(each: Replicate) -> int:
    return 3 if each.shard_params else 2 if each.shard_grads else 1 if each.shard_optimizer else 0


def digest_of(program: Program) -> str:
    """Return a hash of a program's directives."""
    return sha256(repr(program).encode()).hexdigest()[:12]


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
