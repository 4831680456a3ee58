"""``diff``: what two strategies say differently, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper_core.program.strategy import dump
from search.cli import main
from tests.null.export.strategies import data_parallel, pipeline


def write(folder: Path) -> tuple[str, str]:
    dump(pipeline("1f1b", 2, 4, row=2, more=[data_parallel()]), folder / "a.yaml")
    dump(pipeline("zb_h1", 2, 4, row=2, more=[data_parallel(shard_optimizer=True)]), folder / "b.json")
    return str(folder / "a.yaml"), str(folder / "b.json")


def test_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path)
    assert main(["diff", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "schedule: 1f1b became zb_h1"
    assert lines[1] == '- {"op": "replicate", "filter": {}, "axis": "dp"}'
    assert lines[2] == '+ {"op": "replicate", "filter": {}, "axis": "dp", "shard_optimizer": true}'
    assert lines[3].startswith("order of row 0, at 2: 0B0 became 0BI0")
    assert any(line.startswith("  optimizer ") for line in lines)
    assert lines[-2].startswith("step time: ")
    assert main(["diff", a, b, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["header"] == {"schedule": ["1f1b", "zb_h1"]}
    assert [each["op"] for each in data["removed"] + data["added"]] == ["replicate", "replicate"]
    assert {row["row"] for row in data["order"]} == {0, 1}
    assert data["change"]["memory_causes_bytes"]["optimizer"] < 0
    first, second = data["prices"]
    assert second["step_time_s"] - first["step_time_s"] == pytest.approx(data["change"]["step_time_s"])


def test_nothing_differs_whatever_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = pipeline("1f1b", 2, 4, cluster=None)
    dump(made, tmp_path / "a.yaml")
    dump(made, tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no directive and no header field differs",
        "not priced: a header names no cluster (--cluster p4de)",
    ]
    assert main(["diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.json"), "--cluster", "p4d"]) == 0
    assert "step time: the same" in capsys.readouterr().out


def test_a_file_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, _ = write(tmp_path)
    assert main(["diff", a, str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot read the file" in capsys.readouterr().err
