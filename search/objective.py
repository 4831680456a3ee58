"""What a search makes small."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Objective: TypeAlias = Literal["throughput", "memory", "pareto"]
"""Step time; the fullest row's peak memory; or both, one against the other."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
