"""The price of a program that is compiled already, for commands that have the plan at hand."""

from __future__ import annotations

from typing import Any

from piper_core.errors import ConfigError
from piper_core.program.strategy import Header, Strategy
from piper_core.schedule.compile import Compiled
from profiler.spec import Cluster, load_cluster
from search.candidate import Score
from search.compare import Price
from search.cost.roofline import RooflineCost
from search.evaluate import Evaluation, assess

NOT_FAMILIES = ("custom", "list")
"""What else a header's ``schedule`` may say: an order by hand, or by the list scheduler."""


def check_header(header: Header) -> Cluster | None:
    """Return the cluster that a header names, None where it names none.

    Raises:
        ConfigError: an unknown cluster, or a schedule that is no family.
    """
    from piper_core.schedule.families import get_family

    if header.schedule is not None and header.schedule not in NOT_FAMILIES:
        try:
            get_family(header.schedule)
        except ConfigError as error:
            raise ConfigError(f"header field schedule: {error}; or custom, for an order by hand") from None
    try:
        return load_cluster(header.cluster) if header.cluster is not None else None
    except ConfigError as error:
        raise ConfigError(f"header field cluster: {error}") from None


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


def predicted_of(score: Score, cluster: Cluster) -> dict[str, Any]:
    """Return what a header's ``predicted`` says of a score: the whole, and time and the fullest row's memory by cause."""
    found = Price.of(score)
    return {
        "by": f"roofline and alpha-beta costs of {cluster.name}; nothing was measured",
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
