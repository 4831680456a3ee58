"""Scores of requests for steps of many microbatches, from two shorter ones (:mod:`search.rounds`)."""

from __future__ import annotations

from dataclasses import replace

from search.candidate import Score
from search.predict import predict
from search.request import Request
from search.rounds import extended, rounds
from search.space import Configuration


def predict_score(request: Request) -> Score:
    """Return the score of ``predict(request)``, from two shorter steps where it has very many microbatches.

    The same up to rounding. No plan is proved: families' plans run, which tests prove.

    Raises:
        ConfigError, DirectiveError, PlanError: as ``predict``.
    """
    config = request.resolve()
    shorter = rounds(config)
    if shorter is None:
        return predict(request, proved=False).score
    first, second = (predict(_with(request, config, m), proved=False).score for m in shorter)
    return extended(first, second, config, shorter)


def _with(request: Request, config: Configuration, m: int) -> Request:
    batch = config.dp * config.micro_batch * m
    return replace(request, micro_batch=config.micro_batch, num_microbatches=m, global_batch=batch)
