"""All published runs that the package carries: what the accuracy section of the README says, with a little room."""

from __future__ import annotations

import re
from functools import cache

import pytest

from search.table_mode import Predicted, predict_row
from search.validation import report
from search.validation.doubts import DRAINED, UNDIVIDED, doubt
from search.validation.facts import STEPS, load_facts
from search.validation.scores import errors
from search.validation.validate import Validation, validate


@cache
def found() -> Validation:
    return validate(small=False)


def test_step_times_of_all_runs() -> None:
    each = errors(found().pairs)
    assert each.count >= 0.98 * found().rows
    assert each.mean < 0.048
    assert each.median < 0.026
    assert abs(each.bias) < 0.015


def test_sweeps() -> None:
    first, second, third = found().sweeps
    assert first.tau > 0.84
    assert second.tau > 0.94
    assert third.tau > 0.81
    assert all(sweep.regret <= 0.01 for sweep in found().sweeps)
    assert not any(sweep.picked_out_of_memory for sweep in found().sweeps)


def test_sweeps_without_runs_that_others_contradict() -> None:
    assert [sweep.doubted for sweep in found().sweeps] == [16, 0, 2]
    assert all(sweep.sure[0] > 0.9 for sweep in found().sweeps)
    assert all(sweep.sure[1] < 0.025 for sweep in found().sweeps)
    assert "without 2 runs of llama_65B" in report.text(found())


def test_what_fits() -> None:
    fits = found().fits
    assert fits.false_fit <= 0.01
    assert fits.false_out_of_memory <= 0.05
    assert fits.close <= 0.1


def test_gains_of_zero_bubble_schedules() -> None:
    gaps = [abs(gain.predicted - gain.measured) for gain in found().gains]
    assert sum(gap <= 0.03 for gap in gaps) >= 30
    assert max(gaps) < 0.08


def _kernel(row: dict[str, str]) -> str:
    said = re.search(r"kernel=([^;]*)", row["notes"])
    return said[1].strip() if said else ""


def test_flash_attention_2_is_slower_than_1_where_it_is_in_doubt_and_nowhere_else() -> None:
    by: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in load_facts(STEPS):
        if row["source"].startswith("Hagemann"):
            key = row["table"], row["pp"], row["tp"], row["micro_batch"], row["activation_recompute"], row["sp"]
            by.setdefault(key, {})[_kernel(row)] = row
    seconds = [
        (doubt(runs["flash_attention2"]), *(float(runs[k]["step_time_s"]) for k in ("flash_attention2", old)))
        for runs in by.values()
        if "flash_attention2" in runs and (old := "flash_attentionv1.0.8") in runs
    ]
    assert {why for why, *_ in seconds} == {None, DRAINED}
    assert all(new < 0.95 * old for why, new, old in seconds if why is None)
    assert sum(new > old for why, new, old in seconds if why) >= 8


def test_runs_without_sequence_parallelism_that_need_it() -> None:
    rows = [row for row in load_facts(STEPS) if doubt(row) == UNDIVIDED]
    assert len(rows) == 2
    for row in rows:
        without, with_ = (predict_row({**row, "sp": sp}) for sp in ("no", "yes"))
        assert isinstance(without, Predicted)
        assert isinstance(with_, Predicted)
        assert without.fits == "no"
        assert with_.fits != "no"
        assert with_.step_time_s == pytest.approx(float(row["step_time_s"]), rel=0.04)
