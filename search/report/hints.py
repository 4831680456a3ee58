"""What a person could change about a search to give it more room."""

from __future__ import annotations

from search.space import Space, divisors


def hints(space: Space) -> list[str]:
    """Return lines about numbers that hold a search back."""
    return [*_batch_limits_dp(space)]


def _batch_limits_dp(space: Space) -> list[str]:
    """Say so where data parallelism is held by a batch that the GPUs do not divide."""
    gpus, batch = space.gpus, space.global_batch
    largest = max(d for d in divisors(gpus) if batch % d == 0)
    if largest == gpus or "dp" in space.fix:
        return []
    below = batch // gpus * gpus
    would = f"{below} or {below + gpus}" if below else str(gpus)
    return [
        f"dp is {largest} at most, since it must divide the global batch {batch}; a batch of {would} would allow dp up "
        f"to {gpus}"
    ]
