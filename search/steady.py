"""Predictions of long steps from short ones (:mod:`search.rounds`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search.predict import Prediction, predict
from search.request import Request
from search.rounds import rounds


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
    shorter = rounds(config)
    if shorter is None:
        found = predict(request, proved=False)
        return LongStep(found.score.step_time_s, found)

    def of(n: int) -> Prediction:
        batch = n * config.dp * config.micro_batch
        return predict(replace(request, num_microbatches=n, global_batch=batch), proved=False)

    short, longer = of(shorter[0]), of(shorter[1])
    a_round = longer.score.step_time_s - short.score.step_time_s
    more = (config.num_microbatches - shorter[0]) / (shorter[1] - shorter[0])
    return LongStep(short.score.step_time_s + a_round * more, longer)
