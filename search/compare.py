"""What differs between two prices, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from search.candidate import Score

GIB = 2**30
SAME = 1e-6
"""Relative difference below which two prices are the same (headers are written with six decimals)."""
SMALL = 0.05
"""Share of a difference below which a cause is left out of words."""


@dataclass(frozen=True, slots=True)
class Price:
    """Step time and memory of the fullest row, each whole and by cause (empty where only the whole is known)."""

    step_time_s: float
    time_s: Mapping[str, float]
    memory_bytes: float
    memory: Mapping[str, float]
    row: int = 0

    @staticmethod
    def of(score: Score) -> Price:
        """Return the price in a score."""
        row = max(range(len(score.peak_memory_bytes)), key=lambda r: (score.peak_memory_bytes[r], -r))
        return Price(score.step_time_s, score.breakdown, score.peak_memory_bytes[row], score.memory[row], row)

    @staticmethod
    def of_header(predicted: Mapping[str, Any]) -> Price | None:
        """Return the price in a header's ``predicted``; None where it has none, or what a person wrote is none."""
        step: Any = predicted.get("step_time_s")
        peaks: Any = predicted.get("peak_memory_bytes")
        if not _number(step) or not isinstance(peaks, Sequence) or not peaks or not all(map(_number, peaks)):
            return None
        row = max(range(len(peaks)), key=lambda r: (peaks[r], -r))
        parts = [predicted.get("breakdown_s"), predicted.get("memory_bytes")]
        time_s, memory = (
            part if isinstance(part, Mapping) and all(map(_number, part.values())) else {} for part in parts
        )
        return Price(step, time_s, peaks[row], memory, row)


@dataclass(frozen=True, slots=True)
class Change:
    """From one price to another: seconds and bytes, whole and by cause, largest first."""

    time_s: float
    time_causes: Mapping[str, float]
    memory_bytes: float
    memory_causes: Mapping[str, float]
    before: Price
    after: Price

    @staticmethod
    def between(before: Price, after: Price) -> Change:
        """Return what changed."""
        return Change(
            after.step_time_s - before.step_time_s, _causes(before.time_s, after.time_s),
            after.memory_bytes - before.memory_bytes, _causes(before.memory, after.memory), before, after,
        )  # fmt: skip

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {
            "step_time_s": self.time_s, "time_causes_s": dict(self.time_causes), "memory_bytes": self.memory_bytes,
            "memory_causes_bytes": dict(self.memory_causes), "rows": [self.before.row, self.after.row],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Say it in two lines: time and memory, each with the causes that make most of the difference."""
        before, after = self.before, self.after
        time = _words(self.time_s, self.time_causes, before.step_time_s, 1.0, "s")
        memory = _words(self.memory_bytes, self.memory_causes, before.memory_bytes, GIB, "GiB")
        row = f"row {after.row}" if before.row == after.row else f"row {before.row} before, row {after.row} now"
        return [f"step time: {time}", f"memory of the fullest row ({row}): {memory}"]


def _causes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of each cause, largest first; nothing where one side is not known by cause."""
    if not before or not after:
        return {}
    names = sorted({*before, *after})
    found = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    return {name: value for name, value in sorted(found.items(), key=lambda item: -abs(item[1])) if value}


def _words(total: float, causes: Mapping[str, float], whole: float, unit: float, name: str) -> str:
    largest = max([abs(total), *map(abs, causes.values())], default=0.0)
    if largest <= SAME * whole:
        return "the same"
    decimals = max(0, 2 - floor(log10(largest / unit)))
    said = [
        f"{value / unit:+.{decimals}f} {cause.replace('_', ' ')}"
        for cause, value in causes.items()
        if abs(value) >= SMALL * largest
    ]
    share = f" ({total / whole:+.1%})" if whole else ""
    return f"{total / unit:+.{decimals}f} {name}{share}" + (f": {', '.join(said)}" if said else "")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
