"""Leave one source out: refit the constants without a source, and see what becomes of its error.

The constants are those of the device and the links. Each is raised by ``STEP``, which says how the logarithm of every
prediction moves with the logarithm of each constant; a linear fit on the other sources then gives constants that never
saw the one left out. Errors beyond ``CLIP`` count as that, so that single odd runs do not lead the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from piper_core.errors import PiperError
from profiler.spec import Cluster
from search.steady import long_step
from search.validation.facts import STEPS, load_facts
from search.validation.rows import NotExpressedError, Row, request_of

DEVICE = ("matmul_efficiency", "elementwise_efficiency", "attention_efficiency", "attention_backward_efficiency")
LINKS = ("link_efficiency", "network_efficiency")
CONSTANTS = (*DEVICE, *LINKS)
STEP, CLIP, RIDGE = 0.05, 0.1, 0.3
"""Relative step; largest error that counts; weight that holds each constant where it is, in runs of 100 % effect."""
SAMPLE = 10
"""Runs of each source at most, evenly spaced in its table."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Mean absolute error of a source's sample: with the package's constants, and with constants fitted without it;
    ``moved`` is each constant's factor in that fit."""

    source: str
    runs: int
    error: float
    refitted: float
    moved: dict[str, float]


def leave_one_out(gpu: str = "A100-SXM") -> list[LeftOut]:
    """Return what each source's error becomes when the constants are fitted to the others."""
    rows = [row for row in load_facts(STEPS) if row["gpu"] == gpu and row["step_time_s"]]
    names, off, slopes = [], [], []
    for row in _sample(rows):
        found = _logs(row)
        if found is not None:
            names.append(row["source"])
            off.append(found[0])
            slopes.append(found[1:])
    source, error, slope = np.asarray(names), np.asarray(off), np.asarray(slopes)
    return [_left_out(name, source == name, error, slope) for name in dict.fromkeys(names)]


def _sample(rows: Sequence[Row]) -> list[Row]:
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    return [
        mine[i * len(mine) // min(SAMPLE, len(mine))]
        for mine in by_source.values()
        for i in range(min(SAMPLE, len(mine)))
    ]


def _logs(row: Row) -> list[float] | None:
    """Return log(predicted / measured), and how it moves with the logarithm of each constant; None: not expressed."""
    try:
        request = request_of(row)
        base = long_step(request).step_time_s
        moved = [
            long_step(replace(request, cluster=raised(request.cluster, {name: 1 + STEP}))).step_time_s
            for name in CONSTANTS
        ]
    except (NotExpressedError, PiperError):
        return None
    return [log(base / float(row["step_time_s"])), *(log(each / base) / log(1 + STEP) for each in moved)]


def raised(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    """Return a cluster with some of ``CONSTANTS`` multiplied."""
    device = {name: getattr(cluster.device, name) * factors[name] for name in DEVICE if name in factors}
    links = {name: getattr(cluster, name) * factors[name] for name in LINKS if name in factors}
    return replace(cluster, device=replace(cluster.device, **device), **links)


def _left_out(name: str, mine: NDArray[np.bool_], error: NDArray[np.float64], slope: NDArray[np.float64]) -> LeftOut:
    others = ~mine
    a = np.concatenate([slope[others], RIDGE * np.eye(len(CONSTANTS))])
    b = np.concatenate([-np.clip(error[others], -CLIP, CLIP), np.zeros(len(CONSTANTS))])
    shift = np.linalg.lstsq(a, b, rcond=None)[0]
    refitted = error[mine] + slope[mine] @ shift
    return LeftOut(
        name, int(mine.sum()), float(np.abs(np.expm1(error[mine])).mean()), float(np.abs(np.expm1(refitted)).mean()),
        {constant: exp(by) for constant, by in zip(CONSTANTS, shift.tolist(), strict=True)},
    )  # fmt: skip
