"""What a step of many microbatches is, from two shorter ones.

Each family repeats itself: once its pipeline is full, every further round of microbatches takes the same time and holds
the same memory. So seconds are linear in the number of rounds, and two steps that are long enough say all of a longer
one. Not so for two families, which are taken whole: GPipe holds more with every microbatch, and the rows of DualPipe
pass through its two directions at times that drift, so that the messages at its peak differ a little.
"""

from __future__ import annotations

from dataclasses import replace

from piper_core.schedule.families import get_family
from search.candidate import Score
from search.space import Configuration

WHOLE = ("gpipe", "dualpipe")
FILLED = 4
"""Rounds of as many microbatches as rows, after which every family repeats itself (the law tests say so)."""
WORTH = 4
"""A step is shortened where it has so many times the microbatches of the longer of the two."""


def rounds(config: Configuration) -> tuple[int, int] | None:
    """Return two numbers of microbatches that stand for a step's own, None where it is no longer than they are."""
    m, p = config.num_microbatches, config.pp
    family = get_family(config.schedule)
    if config.schedule in WHOLE:
        return None
    step = 2 * p  # interleaved rounds are of p, and dualpipe halves the number
    low = FILLED * p * config.virtual_stages
    low += (m - low) % step
    high = low + step
    legal = family.microbatches(p, config.virtual_stages)
    if m < WORTH * high or low not in legal or high not in legal:
        return None
    return low, high


def extended(a: Score, b: Score, config: Configuration, shorter: tuple[int, int]) -> Score:
    """Return the score of a configuration on the line through those of two numbers of microbatches."""
    rounds_ = (config.num_microbatches - shorter[0]) / (shorter[1] - shorter[0])

    def line(low: float, high: float) -> float:
        return low + rounds_ * (high - low)

    def lines(low: dict[str, float], high: dict[str, float]) -> dict[str, float]:
        return {name: max(0.0, line(low.get(name, 0.0), high.get(name, 0.0))) for name in {**low, **high}}

    seconds = line(a.step_time_s, b.step_time_s)
    busy = line((1 - a.bubble_ratio) * a.step_time_s, (1 - b.bubble_ratio) * b.step_time_s)
    quicker = b.step_time_s / seconds * config.num_microbatches / shorter[1]
    return replace(
        b,
        step_time_s=seconds,
        tokens_per_s_per_gpu=b.tokens_per_s_per_gpu * quicker,
        model_tflops_per_gpu=b.model_tflops_per_gpu * quicker,
        mfu=b.mfu * quicker,
        bubble_ratio=max(0.0, 1 - busy / seconds),
        exposed_communication_s=lines(a.exposed_communication_s, b.exposed_communication_s),
        breakdown=lines(a.breakdown, b.breakdown),
    )
