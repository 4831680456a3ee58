"""Records that are the same but for rounding."""

from __future__ import annotations

from math import isclose
from typing import Any


def differences(a: Any, b: Any, where: str = "", *, within: float = 1e-12) -> list[str]:
    """Return where two records differ by more than rounding, or by a larger part of what they say."""
    if isinstance(a, dict):
        return [
            text for key in {**a, **b} for text in differences(a.get(key), b.get(key), f"{where}.{key}", within=within)
        ]
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)}"]
        return [
            text
            for i, pair in enumerate(zip(a, b, strict=True))
            for text in differences(*pair, f"{where}[{i}]", within=within)
        ]
    same = isclose(a, b, rel_tol=within, abs_tol=1e-15) if isinstance(a, float) and isinstance(b, float) else a == b
    return [] if same else [f"{where}: {a} and {b}"]
