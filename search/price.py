"""The price of a program that is compiled already, for commands that have the plan at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled
from profiler.spec import Cluster
from search.candidate import Score
from search.compare import Price
from search.cost.roofline import RooflineCost
from search.evaluate import Evaluation, assess


def price(strategy: Strategy, compiled: Compiled, cluster: Cluster) -> Evaluation:
    """Return what a compiled strategy costs on a cluster: as ``predict_strategy``, without compiling it again.

    Raises:
        ConfigError: the header's model is unknown.
    """
    from piper_core.arch import load_architecture

    header, plan = strategy.header, compiled.plan
    model = header.model
    known = model is not None and not model.startswith(("dense:", "moe:"))
    return assess(
        compiled, RooflineCost(cluster), cluster.device, seq_len=compiled.dag.model.seq_len,
        gpus=header.world.size if header.world else len({rank for row in plan.rows for rank in row}),
        global_batch=header.global_batch, architecture=load_architecture(model) if known and model else None,
    )  # fmt: skip


def predicted_of(score: Score, cluster: Cluster, by: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a header's ``predicted`` says of a score: ``by`` what it was priced, the whole, time by cause, the
    fullest row by cause."""
    found = Price.of(score)
    return {
        **(by or {"by": f"roofline and alpha-beta costs of {cluster.name}; nothing was measured"}),
        "step_time_s": _digits(score.step_time_s),
        "tokens_per_s_per_gpu": round(score.tokens_per_s_per_gpu, 1),
        "mfu": round(score.mfu, 4),
        "peak_memory_bytes": [round(size) for size in score.peak_memory_bytes],
        "bubble_ratio": round(score.bubble_ratio, 4),
        "breakdown_s": {cause: _digits(seconds) for cause, seconds in found.time_s.items()},
        "memory_bytes": {cause: round(size) for cause, size in found.memory.items()},
    }


def _digits(value: float) -> float:
    """Return a number with the eight digits that a file keeps."""
    return float(f"{value:.8g}")
