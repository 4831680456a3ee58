"""The layouts that people published for a model and a cluster, priced like everything else, against what the search
finds for the same model, cluster, batch and sequence: the winner must be at least as good as each that fits.

Every layout is given the kernels that the search prices, whatever it ran with. The published step times are not looked
at: this is a check of the search, not of the costs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from piper_core.errors import PiperError
from search.cost.software import OWN
from search.engine import Problem, search
from search.predict import predict
from search.request import Kernels, Request
from search.space import Space
from search.validation.facts import STEPS, load_facts
from search.validation.rows import request_of

BUDGET_S = 30.0
MOST_GPUS = 256
"""Larger clusters take longer than a benchmark may."""


def published() -> Iterator[Request]:
    """Yield the layouts that can be said, with the search's own kernels and software."""
    for row in load_facts(STEPS):
        try:
            request = replace(request_of(row), kernels=Kernels(), software=OWN)
        except PiperError:
            continue
        if (request.gpus or 0) <= MOST_GPUS and "A100" in request.cluster.device.name:
            yield request


def problem_of(request: Request) -> tuple[object, ...]:
    return request.architecture.name, request.cluster.name, request.gpus, request.global_batch, request.seq_len


def main() -> int:
    """Print a table of each problem: the best published layout, the winner, and the gain."""
    requests = sorted(published(), key=lambda each: str(problem_of(each)))
    good = True
    print(
        f"{'model':18}{'cluster':28}{'GPUs':>5}{'batch':>6}{'layouts':>8}{'best s':>9}"
        f"{'search s':>9}{'gain':>7}{'gap':>7}"
    )
    for key, group in groupby(requests, key=problem_of):
        layouts = list(group)
        times = []
        for request in layouts:
            try:
                score = predict(request, proved=False).score
            except PiperError:
                continue
            if score.fits == "yes":
                times.append(score.step_time_s)
        first = layouts[0]
        assert first.gpus is not None and first.global_batch is not None  # noqa: PT018  # every row has both
        problem = Problem(first.architecture, first.cluster, first.gpus, first.global_batch, first.seq_len)
        space = Space(
            first.architecture, first.gpus, first.cluster.gpus_per_node, first.global_batch, first.seq_len, {}
        )
        try:
            found = search(problem, space, budget_s=BUDGET_S)
        except PiperError as error:
            print(f"{key}: {error}", file=sys.stderr)
            continue
        best, ours = min(times, default=float("nan")), found.best.score.step_time_s
        good &= not times or ours <= best * (1 + 1e-6)
        name, cluster, gpus, batch, _ = key
        print(f"{name!s:18}{cluster!s:28}{gpus!s:>5}{batch!s:>6}{len(layouts):8}{best:9.3f}{ours:9.3f}"
              f"{best / ours - 1:7.1%}{found.proof_gap:7.1%}", flush=True)  # fmt: skip
    print("PASS" if good else "FAIL", "the winner is at least as good as every published layout that fits")
    return 0 if good else 1
