"""Long steps from short ones: once a pipeline is full, each further round of microbatches takes the same time.

A plan of m microbatches fills, repeats, and drains. From ``FULL`` rounds of p microbatches on, another round adds the
period of the repeated part and nothing else, so two steps that are long enough say all of a longer one. Memory changes
no longer either. GPipe repeats nothing: it holds every microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from search.candidate import Score
from search.space import Configuration

FULL = {"1f1b": 1, "zb_h1": 2}
"""Rounds of p microbatches after which a family repeats itself; ``OTHERS`` where it is not named."""
OTHERS = 3


def rounds(config: Configuration) -> tuple[int, int] | None:
    """Return two numbers of microbatches that stand for a step's own, None where it is no longer than they are."""
    p, m, name = config.pp, config.num_microbatches, config.schedule
    round_ = p * (2 if FAMILIES[name].layout is Layout.BIDIRECTIONAL else 1)
    least = FULL.get(name, OTHERS) * round_ + m % round_
    return None if name == "gpipe" or m <= least + round_ else (least, least + round_)


def representative(config: Configuration) -> int | None:
    """Return a number of microbatches that proves a longer step: the least from which on a row's order has every slot
    after every other that it ever has (a test looks), so that the plan of the one runs where that of the other does.
    Interleaved steps of no whole number of rounds go on changing, and are proved by one of :func:`rounds`. None where
    the configuration has no more microbatches.
    """
    p, m, name = config.pp, config.num_microbatches, config.schedule
    if name == "gpipe":
        return None
    if name == "interleaved_1f1b" and m % p:
        known = rounds(config)
        return known and known[0]
    legal = FAMILIES[name].microbatches(p, config.virtual_stages)
    return next((n for n in range(3 * p if name == "interleaved_1f1b" else 2 * p + 2, m) if n in legal), None)


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
