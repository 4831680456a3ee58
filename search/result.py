"""What a search found, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from search.generators.best_first import ROUNDING
from search.objective import Objective
from search.problem import Candidate


@dataclass(slots=True)
class Result:
    """What a search found. ``candidates`` fit, best first; ``close`` counts those too close to call. ``proof_gap`` is
    how much quicker than the best, as a fraction, anything that was not evaluated could be under the same costs;
    ``least_left_s`` is a step time that nothing of that kind beats, other buckets, prefetches and streams of what was
    evaluated aside, ``least_s`` one that neither those nor any other order beats; ``family_gap`` is the gap to the
    former. ``finer`` counts those that were evaluated, ``reordered`` the orders of the list scheduler, ``needless``
    what fits but recomputes more than another, ``alike`` what fits but differs from a candidate in bucket, prefetch or
    streams alone. ``batches`` counts those evaluated before tuning and in it: for as many
    of each, the candidates are the same."""

    candidates: list[Candidate] = field(default_factory=list)
    size: int = 0
    pruned: dict[str, int] = field(default_factory=dict)
    simulated: int = 0
    rejected: int = 0
    too_big: int = 0
    close: int = 0
    proof_gap: float = inf
    least_left_s: float = inf
    least_s: float = inf
    finer: int = 0
    reordered: int = 0
    needless: int = 0
    alike: int = 0
    batches: list[int] = field(default_factory=lambda: [0, 0])
    objective: Objective = "throughput"
    family_gap: float = inf
    wall_s: float = 0.0
    stopped: str = ""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def proved(self) -> int:
        """How many of the candidates, from the first, nothing that was not evaluated can beat."""
        return sum(each.value(self.objective) <= self.least_left_s * ROUNDING for each in self.candidates)


def to_data(result: Result, seed: int) -> dict[str, Any]:
    """Return the JSON form of a result."""
    rows = [candidate_data(candidate, i) for i, candidate in enumerate(result.candidates)]
    return {
        "best": rows[0],
        "candidates": rows,
        "pareto": [rows[i]["id"] for i in pareto(result.candidates)],
        "space": {"size": result.size, "pruned": result.pruned, "simulated": result.simulated},
        "proof_gap": result.proof_gap,
        "family_gap": result.family_gap,
        "objective": result.objective,
        "proved": result.proved,
        "stopped": result.stopped,
        "batches": result.batches,
        "wall_s": result.wall_s,
        "seed": seed,
    }


def candidate_data(candidate: Candidate, rank: int) -> dict[str, Any]:
    """Return the JSON form of one candidate."""
    config = candidate.config
    return {
        "id": rank,
        "degrees": {
            "pp": config.pp, "tp": config.tp, "dp": config.dp, "ep": config.ep, "cp": config.cp,
            "virtual_stages": config.virtual_stages,
        },
        "zero_stage": config.zero,
        "schedule": config.schedule,
        "micro_batch": config.micro_batch,
        "num_microbatches": config.num_microbatches,
        "recompute": config.recompute,
        "sequence_parallel": config.sequence_parallel,
        "cuts": config.cuts,
        "outer": config.outer,
        "bucket": config.bucket,
        "prefetch": config.prefetch,
        "streams": config.streams,
        "order": config.order,
        "layers_per_stage": list(candidate.layers_per_stage),
        "predicted": candidate.score.to_data(),
        "measured": None,
        "strategy_file": None,
    }  # fmt: skip


def pareto(candidates: Sequence[Candidate]) -> list[int]:
    """Return the indices of candidates that no other beats in both step time and memory, quickest first."""
    front: list[int] = []
    least = inf
    for i, candidate in enumerate(candidates):
        if candidate.score.worst_row_bytes < least:
            front.append(i)
            least = candidate.score.worst_row_bytes
    return front
