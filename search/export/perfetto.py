"""The predicted timeline as a trace that ui.perfetto.dev opens, with the memory of each row as a counter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from search.export.base import Export
from search.export.job import Job

if TYPE_CHECKING:
    from search.predict import Prediction

FILE = "timeline.perfetto.json"


def export(job: Job) -> Export:
    """Return ``timeline.perfetto.json``: the predicted first step.

    Raises:
        ConfigError: the strategy names no cluster to price it for.
    """
    from search.predict import predict_strategy

    return Export(
        {FILE: trace_of(predict_strategy(job.strategy))},
        ("a timeline is a picture: nothing can be run from it",),
        ("open it at ui.perfetto.dev or chrome://tracing; the times are predicted, of a first step",),
    )


def trace_of(made: Prediction) -> str:
    """Return the trace of a prediction."""
    from search.report.memory_levels import memory_over_time
    from search.report.perfetto import perfetto

    trace = perfetto(made.simulation.timeline(), label="row")
    for row, levels in enumerate(memory_over_time(made)):
        trace["traceEvents"] += [
            {"ph": "C", "pid": row, "name": "memory GiB", "ts": at * 1e6, "args": {"GiB": size / 2**30}}
            for at, size in levels
        ]
    return json.dumps(trace, separators=(",", ":"))
