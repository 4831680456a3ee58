"""Table mode as a command: rows in, predictions out, bad tables refused whole."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from search.cli import main
from search.table_mode import ADDED
from search.validation.facts import STEPS, load_facts

ROWS = [row for row in load_facts(STEPS) if row["dtype"] in ("bf16", "fp8")]
FEW = [ROWS[0], next(row for row in ROWS if row["dtype"] == "fp8"), ROWS[3]]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_predictions_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write(tmp_path / "in.csv", FEW), tmp_path / "out.csv"
    assert main(["predict", "--table", str(table), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("2 of 3 rows predicted\n  1 not predicted: fp8")
    with out.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == [*FEW[0], *ADDED]
    assert [{name: row[name] for name in FEW[0]} for row in found] == FEW
    assert float(found[0]["predicted_step_time_s"]) > 0
    assert found[0]["predicted_fits"] in ("yes", "no", "close")
    assert found[1]["predicted_step_time_s"] == ""
    assert "fp8" in found[1]["not_predicted_because"]
    again = tmp_path / "again.csv"
    assert main(["predict", "--table", str(out), "--out", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": "-1"}, "line 3: column tp: expected a number of at least 0, found '-1'"),
        ({"seq_len": "NaN"}, "line 3: column seq_len"),
        (None, "missing column tp, pp"),
    ],
)
def test_a_bad_table_is_refused_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str] | None, words: str
) -> None:
    rows = [ROWS[0], ROWS[3] | (change or {})]
    if change is None:
        rows = [{name: value for name, value in row.items() if name not in ("tp", "pp")} for row in rows]
    out = tmp_path / "out.csv"
    assert main(["predict", "--table", str(write(tmp_path / "in.csv", rows)), "--out", str(out)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("piper-search: error: table ")
    assert words in last
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "in.csv"], "go together"),
        (["--out", "out.csv"], "go together"),
        (["--table", "in.csv", "--out", "out.csv", "--tp", "2"], "--tp has no place beside --table"),
        (["--table", "none.csv", "--out", "out.csv"], "none.csv: No such file"),
        (["--table", "torn.csv", "--out", "out.csv"], "line 2: not as many values"),
        (["--table", "latin.csv", "--out", "out.csv"], "not UTF-8"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.csv"), FEW)
    head = Path("in.csv").read_text(encoding="utf-8").splitlines()[0]
    Path("torn.csv").write_text(f"{head}\nonly,three,values\n", encoding="utf-8")
    Path("latin.csv").write_bytes(b"mod\xe8le\n")
    assert main(["predict", *arguments]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not Path("out.csv").exists()


def test_a_picture_has_a_known_ending(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--out", "picture.gif"]) == 2
    assert ".svg or .html" in capsys.readouterr().err
