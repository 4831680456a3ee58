"""The simulator against the slow reference of the tests on 1,000 random plans, with and without contention."""

from __future__ import annotations

from random import Random

from tests.null.simulator.test_contention import check_against_reference

PLANS = 1000


def main() -> int:
    """Print how many plans agreed, and how many of them had contention; a difference is an AssertionError."""
    rng = Random(2026)
    contended = sum(check_against_reference(rng) for _ in range(PLANS))
    print(f"{PLANS:,} random plans agree with the reference, {contended} of them with contention")
    return 0 if contended >= PLANS // 10 else 1
