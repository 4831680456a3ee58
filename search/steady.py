"""Long steps from short ones: once a pipeline is full, each further round of microbatches takes the same time.

A plan of m microbatches fills, repeats, and drains. From ``FULL`` rounds of p microbatches on, another round adds the
period of the repeated part and nothing else, so a step of any length follows from two short ones. Memory no longer
changes either. GPipe repeats nothing: it holds every microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from search.predict import Prediction, predict
from search.request import Request

FULL = {"1f1b": 1, "zb_h1": 2}
"""Rounds of p microbatches after which a family repeats itself; ``OTHERS`` where it is not named."""
OTHERS = 3


@dataclass(frozen=True, slots=True)
class LongStep:
    """The step time of a request, and the prediction of a step that is as long or shorter and needs the same memory."""

    step_time_s: float
    short: Prediction


def long_step(request: Request) -> LongStep:
    """Predict a step without simulating all of its microbatches; as ``predict`` within rounding.

    Raises:
        As ``predict``.
    """
    config = request.resolve()
    p, m, name = config.pp, config.num_microbatches, config.schedule
    family = FAMILIES[name]
    round_ = p * (2 if family.layout is Layout.BIDIRECTIONAL else 1)
    least = FULL.get(name, OTHERS) * round_ + m % round_
    if name == "gpipe" or m <= least + round_:
        found = predict(request, proved=False)
        return LongStep(found.score.step_time_s, found)

    def of(n: int) -> Prediction:
        batch = n * config.dp * config.micro_batch
        return predict(replace(request, num_microbatches=n, global_batch=batch), proved=False)

    short, longer = of(least), of(least + round_)
    a_round = longer.score.step_time_s - short.score.step_time_s
    return LongStep(short.score.step_time_s + a_round * ((m - least) // round_), longer)
