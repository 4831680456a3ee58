"""What evaluating a candidate strategy says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["yes", "no", "close"]
"""Whether a strategy fits in memory; ``close`` where the estimate cannot tell."""


@dataclass(frozen=True, slots=True)
class Score:
    """How good one strategy is, and why.

    ``peak_memory_bytes`` and ``memory`` (bytes by cause) are by row; ``margin_bytes`` is what the worst row leaves
    free; ``fits`` is ``yes``, ``no`` or ``close``. ``mfu`` counts model FLOPs without recompute against the device's
    dense peak. ``exposed_communication_s`` is by kind, mean over rows; ``breakdown`` is where a step's seconds go,
    mean over rows, and adds up to ``step_time_s``.
    """

    step_time_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    peak_memory_bytes: tuple[float, ...]
    margin_bytes: float
    fits: Verdict
    bubble_ratio: float
    exposed_communication_s: dict[str, float]
    breakdown: dict[str, float]
    memory: tuple[dict[str, float], ...] = field(default=())

    @property
    def verdict(self) -> str:
        """Whether it fits, in words: a full device loses more to the allocator than the peak counts."""
        if self.fits == "close":
            return "too close to call"
        if self.fits == "yes":
            return "fits"
        lost = " once the allocator of a full device has lost its part" if self.margin_bytes > 0 else ""
        return f"DOES NOT FIT{lost}"

    @property
    def worst_row_bytes(self) -> float:
        """Peak of the row that needs most."""
        return max(self.peak_memory_bytes, default=0.0)

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        data = asdict(self)
        return data | {"peak_memory_bytes": list(self.peak_memory_bytes), "memory": list(self.memory)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Score:
        """Return the record that :meth:`to_data` wrote.

        Raises:
            TypeError, ValueError: something else.
        """
        tuples = {name: tuple(data[name]) for name in ("peak_memory_bytes", "memory") if name in data}
        return cls(**{**data, **tuples})


Outcome: TypeAlias = Score | str
"""A score, or the reason why a configuration was rejected."""
