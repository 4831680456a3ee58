"""Predict the published measurements and score the predictions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from search.table_mode import GIB, Predicted, predict_rows
from search.validation.doubts import doubt
from search.validation.facts import FITS, SMALL, STEPS, load_facts
from search.validation.rows import Row
from search.validation.scores import Confusion, Errors, Pair, Trial, by_layout, errors, kendall, regret

SWEEPS = "Hagemann"
DEVICE = "A100-SXM"
ZERO_BUBBLE = "Qi et al."
LAYOUT = ("tp", "pp", "micro_batch", "activation_recompute", "sp")
RUN = ("model", "n_gpus", "pp", "micro_batch", "global_batch")
"""What runs share of which only the schedule differs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep over layouts: rank correlation, error after one rescale, regret (fraction of MFU) of the pick.

    ``sure`` is the rank correlation and the error after one rescale without its ``doubted`` runs.
    """

    table: str
    layouts: int
    tau: float
    spread: float
    regret: float
    picked_out_of_memory: bool
    doubted: int
    sure: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gain:
    """A schedule's gain in throughput over 1F1B in the same run, measured and predicted, as fractions."""

    run: str
    schedule: str
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Peak:
    """A measured peak, GiB, and its prediction."""

    run: str
    measured_gib: float
    predicted_gib: float


@dataclass(frozen=True, slots=True)
class Validation:
    """All scores. ``pairs`` are of ``DEVICE``, ``elsewhere`` of other devices, ``small`` of vTrain's GPTs."""

    pairs: tuple[Pair, ...]
    rows: int
    elsewhere: tuple[Pair, ...]
    small: tuple[Pair, ...]
    not_predicted: tuple[tuple[str, int], ...]
    sweeps: tuple[Sweep, ...]
    fits: Confusion
    gains: tuple[Gain, ...]
    peaks: tuple[Peak, ...]

    def by_source(self, pairs: Sequence[Pair]) -> dict[str, Errors]:
        """Return the errors of each source."""
        sources = dict.fromkeys(pair.source for pair in pairs)
        return {source: errors([pair for pair in pairs if pair.source == source]) for source in sources}


def validate(*, small: bool = True) -> Validation:
    """Predict every measurement that the package carries; ``small`` includes vTrain's 375 runs of small models."""
    steps = load_facts(STEPS)
    found = predict_rows(steps, STEPS)
    fits = load_facts(FITS)
    verdicts = predict_rows(fits, FITS)
    tiny = load_facts(SMALL) if small else []
    measured = [(row, each) for row, each in zip(steps, found, strict=True) if row["step_time_s"]]
    ours = [(row, each) for row, each in measured if row["gpu"] == DEVICE]
    reasons = Counter(each for _, each in ours if isinstance(each, str))
    return Validation(
        pairs=_pairs(ours),
        rows=len(ours),
        elsewhere=_pairs([(row, each) for row, each in measured if row["gpu"] != DEVICE]),
        small=_pairs(list(zip(tiny, predict_rows(tiny, SMALL), strict=True))),
        not_predicted=tuple(reasons.most_common()),
        sweeps=_sweeps(ours, list(zip(fits, verdicts, strict=True))),
        fits=_confusion(fits, verdicts),
        gains=_gains(ours),
        peaks=tuple(
            Peak(_name(row), float(row["peak_mem_gb"]), each.peak_memory_bytes / GIB)
            for row, each in ours
            if row["peak_mem_gb"] and isinstance(each, Predicted)
        ),
    )


def _pairs(rows: Sequence[tuple[Row, Predicted | str]]) -> tuple[Pair, ...]:
    return tuple(
        Pair(_short(row["source"]), float(row["step_time_s"]), each.step_time_s, tuple(row[name] for name in LAYOUT))
        for row, each in rows
        if isinstance(each, Predicted)
    )


def _short(source: str) -> str:
    """Return a source without what stands in brackets or after an @."""
    return re.sub(r"\s*(\(.*|@.*)$", "", source)


def _name(row: Row) -> str:
    return f"{row['model']} {row['schedule']} on {float(row['n_gpus']):.0f}"


def _trial(row: Row) -> str:
    found = re.search(r"trial (\d+)", row["notes"])
    return found[1] if found else ""


def _sweeps(
    steps: Sequence[tuple[Row, Predicted | str]], fits: Sequence[tuple[Row, Predicted | str]]
) -> tuple[Sweep, ...]:
    mine = [(row, each) for row, each in steps if row["source"].startswith(SWEEPS)]
    mfu = {_trial(row): float(row["printed_mfu_pct"]) / 100 for row, _ in mine}
    sweeps = []
    for table in dict.fromkeys(row["table"] for row, _ in mine):
        here = [(row, each) for row, each in mine if row["table"] == table]
        kept = [(row, each) for row, each in here if doubt(row) is None]
        layouts = by_layout(_pairs(here))
        trials = [
            Trial(mfu.get(_trial(row)), each.step_time_s, each.fits)
            for row, each in fits
            if row["table"] == table and isinstance(each, Predicted)
        ]
        both, sure = _order(layouts), _order(by_layout(_pairs(kept)))
        sweeps.append(Sweep(table, len(layouts), *both, *regret(trials), len(here) - len(kept), sure))
    return tuple(sweeps)


def _order(layouts: Sequence[Pair]) -> tuple[float, float]:
    """Return rank correlation, and the error after one rescale."""
    tau = kendall([pair.predicted_s for pair in layouts], [pair.measured_s for pair in layouts])
    return tau, errors(layouts).spread


def _confusion(rows: Sequence[Row], found: Sequence[Predicted | str]) -> Confusion:
    ran: Counter[str] = Counter()
    out: Counter[str] = Counter()
    for row, each in zip(rows, found, strict=True):
        if isinstance(each, Predicted):
            (ran if float(row["measured_value"]) else out)[each.fits] += 1
    return Confusion(ran, out)


def _gains(rows: Sequence[tuple[Row, Predicted | str]]) -> tuple[Gain, ...]:
    """Compare the schedules of the zero-bubble paper with 1F1B where nothing else differs."""
    runs: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for row, each in rows:
        if row["source"].startswith(ZERO_BUBBLE) and isinstance(each, Predicted) and "instead of" not in row["notes"]:
            times = float(row["step_time_s"]), each.step_time_s
            runs.setdefault(tuple(row[name] for name in RUN), {})[row["schedule"]] = times
    return tuple(
        Gain(" ".join(run), schedule, base[0] / times[0] - 1, base[1] / times[1] - 1)
        for run, schedules in runs.items()
        if (base := schedules.get("1F1B"))
        for schedule, times in schedules.items()
        if schedule != "1F1B"
    )
