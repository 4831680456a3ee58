"""How near predictions come to published runs, held on a sample with room to spare; ``validate`` has all of them."""

from __future__ import annotations

from collections import Counter

import pytest

from search.table_mode import GIB, Predicted, predict_row
from search.validation.facts import FITS, SMALL, STEPS, load_facts
from search.validation.scores import Pair, errors, kendall

A100 = [row for row in load_facts(STEPS) if row["gpu"] == "A100-SXM"]
LIMITS = {  # mean error at most, of every n-th row
    "Hagemann": (9, 0.08),
    "Qi": (6, 0.05),
    "mosaicml": (4, 0.06),
    "InternLM": (3, 0.09),
    "Korthikanti": (1, 0.07),
}


def pairs_of(rows: list[dict[str, str]]) -> list[Pair]:
    found = [(row, predict_row(row)) for row in rows]
    return [
        Pair(row["source"], float(row["step_time_s"]), each.step_time_s)
        for row, each in found
        if isinstance(each, Predicted)
    ]


@pytest.mark.parametrize("source", LIMITS)
def test_step_times(source: str) -> None:
    every, limit = LIMITS[source]
    rows = [row for row in A100 if row["source"].startswith(source)][::every]
    pairs = pairs_of(rows)
    assert len(pairs) == len(rows)
    assert errors(pairs).mean < limit


def test_small_models() -> None:
    """Python, not the device, is what takes time there."""
    found = errors(pairs_of(load_facts(SMALL)[::15]))
    assert found.mean < 0.15


def test_layouts_rank_as_measured() -> None:
    rows = [row for row in A100 if "8k_seq" in row["table"]][::2]
    pairs = pairs_of(rows)
    assert kendall([pair.predicted_s for pair in pairs], [pair.measured_s for pair in pairs]) > 0.8


def test_out_of_memory() -> None:
    verdicts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for row in load_facts(FITS)[::6]:
        found = predict_row(row)
        assert isinstance(found, Predicted)
        verdicts[float(row["measured_value"]) == 1][found.fits] += 1
    assert verdicts[False]["yes"] <= 1
    assert verdicts[True]["no"] <= 2
    assert verdicts[True]["close"] + verdicts[False]["close"] <= 6


def test_peaks_of_the_zero_bubble_paper() -> None:
    """arXiv 2401.10241, tables 4 and 6: within 12 %; all but one within 8 %."""
    rows = [row for row in A100 if row["source"].startswith("Qi") and row["peak_mem_gb"] and row["pp"] == "8.0"
            and float(row["peak_mem_gb"]) > 25][::5]  # fmt: skip
    off = []
    for row in rows:
        found = predict_row(row)
        assert isinstance(found, Predicted)
        off.append(abs(found.peak_memory_bytes / GIB / float(row["peak_mem_gb"]) - 1))
    assert max(off) < 0.12
    assert sum(each > 0.08 for each in off) <= 1


def test_gains_of_schedules() -> None:
    """The same paper: each schedule's gain over 1F1B, in points of throughput."""
    run = {"model": "GPT-6.2B", "micro_batch": "3.0", "global_batch": "96.0"}
    rows = [row for row in A100 if row["source"].startswith("Qi") and run.items() <= row.items()]
    times = {}
    for row in rows:
        found = predict_row(row)
        assert isinstance(found, Predicted)
        times[row["schedule"]] = float(row["step_time_s"]), found.step_time_s
    assert set(times) == {"1F1B", "1F1B-interleaved", "ZB-1p", "ZB-2p"}
    measured, predicted = times["1F1B"]
    for one, other in times.values():
        assert measured / one == pytest.approx(predicted / other, abs=0.04)
