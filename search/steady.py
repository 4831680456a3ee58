"""Predictions of long steps from short ones (:mod:`search.rounds`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search.candidate import Score
from search.predict import quick
from search.request import Request
from search.rounds import rounds
from search.space import Configuration


@dataclass(frozen=True, slots=True)
class LongStep:
    """The step time of a request, and the configuration and the score of a step that is as long or shorter and needs
    the same memory."""

    step_time_s: float
    config: Configuration
    short: Score


def long_step(request: Request) -> LongStep:
    """Predict a step without simulating all of its microbatches; as ``predict`` within rounding.

    Raises:
        As ``predict``.
    """
    config = request.resolve()
    shorter = rounds(config)
    if shorter is None:
        found = quick(request).score
        return LongStep(found.step_time_s, config, found)

    def of(n: int) -> Score:
        batch = n * config.dp * config.micro_batch
        return quick(replace(request, num_microbatches=n, global_batch=batch)).score

    short, longer = of(shorter[0]), of(shorter[1])
    a_round = longer.step_time_s - short.step_time_s
    more = (config.num_microbatches - shorter[0]) / (shorter[1] - shorter[0])
    return LongStep(short.step_time_s + a_round * more, config, longer)
