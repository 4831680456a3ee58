"""A step as predicted and as measured, on one page."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest

from piper_core.ir.timeline import Timeline
from search.cli.run_report import write
from search.predict import Prediction, predict_strategy
from search.report.side_by_side import mean_by_kind, side_by_side
from tests.null.export.strategies import pipeline
from tests.null.report.test_html import Tags


@pytest.fixture(scope="module")
def found() -> Prediction:
    return predict_strategy(pipeline("dualpipev", 2, 4, 2))


def test_both_pictures_and_what_each_kind_took(found: Prediction, tmp_path: Path) -> None:
    timeline, seconds = found.simulation.timeline(), found.score.step_time_s
    measured = timeline.shifted(seconds / 10)
    path = tmp_path / "step.html"
    write(path, "small <dualpipev>", Namespace(timeline=measured, seconds=1.5 * seconds), found)  # type: ignore[arg-type]  # a double
    page = path.read_text()
    assert page.count("<svg ") == 2
    first, second = page.split("<svg ")[1:]
    assert f"predicted: {seconds:.4g} s a step" in first
    assert f"measured: {1.5 * seconds:.4g} s a step" in second
    for picture in (first, second):
        actions = set(re.findall(r"<title>(\d+(?:F|B|BI|BW)\d+) ", picture))
        assert actions == {each.text for _, each in timeline.events() if re.fullmatch(r"\d+(F|B|BI|BW)\d+", each.text)}
    ratios = re.findall(r"<td>(\d\.\d\d)</td></tr>", page)
    assert ratios == ["1.00"] * len(mean_by_kind(timeline))
    assert "small &lt;dualpipev&gt;" in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == []


def test_where_nothing_was_predicted(found: Prediction) -> None:
    page = side_by_side("x", None, (found.simulation.timeline(), 1.0))
    assert page.count("<svg ") == 1
    assert "Nothing was predicted of this run." in page


def test_an_empty_timeline() -> None:
    assert mean_by_kind(Timeline(())) == {}
