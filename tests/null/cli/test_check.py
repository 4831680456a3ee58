"""``piper-search check``: verdicts, exit statuses, what is printed where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper_core.directives import Order
from piper_core.ir.action import format_slots
from piper_core.program.strategy import base_dag, load
from piper_core.schedule.compile import compile_program
from piper_core.schedule.plan_text import format_plan, parse_plan
from search.cli import main

GOLDEN = Path(__file__).parents[2] / "golden"
TEN_LINES = GOLDEN / "readme" / "ten_lines.yaml"
KEYS = {
    "nodes", "edges", "actions", "streams", "rows", "ranks", "gpus", "stages", "microbatches", "compile_s", "verify_s",
    "verified", "error", "canonical", "derived_rows", "notes",
    "predicted", "not_priced", "not_by", "changes",
}  # fmt: skip
PIPELINE: list[dict[str, Any]] = [
    {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4},
    {"op": "place", "filter": {"PP": 0}, "devices": [0]},
    {"op": "place", "filter": {"PP": 1}, "devices": [1]},
]
ORDER: dict[str, Any] = {
    "op": "order",
    "actions": {"0": "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1": "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"},
}
DEADLOCK = {"op": "order", "actions": ORDER["actions"] | {"1": "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"}}
DENSE = ("--synthetic", "dense:8")


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run ``check`` in this process; return the exit status, stdout and stderr."""
    status = main(["check", *words])
    return status, *capsys.readouterr()


def write(folder: Path, program: object, name: str = "program.json") -> str:
    path = folder / name
    path.write_text(json.dumps(program))
    return str(path)


def scrub(text: str) -> str:
    """Blank out the timings."""
    return re.sub(r"\d+\.\d+ s\b", "T s", text)


def one_line(text: str) -> str:
    """Return the only line of stderr."""
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.startswith("piper-search: error: ")
    return text


def test_verified(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = check(capsys, write(tmp_path, [*PIPELINE, ORDER]), *DENSE)
    assert (status, err) == (0, "")
    golden("cli/verified.txt", scrub(out.replace(str(tmp_path) + os.sep, "")))


def test_rejected(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = check(capsys, write(tmp_path, [*PIPELINE, DEADLOCK]), *DENSE)
    assert status == 2
    golden("cli/deadlock.txt", out + one_line(err))


def test_notes(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Directives out of order, a partial order and stages taken from the file are each said."""
    status, out, _ = check(capsys, write(tmp_path, PIPELINE[::-1]), *DENSE)
    assert status == 0
    golden("cli/notes.txt", scrub(out.replace(str(tmp_path) + os.sep, "")))


@pytest.mark.parametrize(("program", "status"), [([*PIPELINE, ORDER], 0), ([*PIPELINE, DEADLOCK], 2)])
def test_json(program: list[Any], status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done, out, err = check(capsys, write(tmp_path, program), *DENSE, "--json")
    data = json.loads(out)
    assert done == status
    assert data.keys() >= KEYS
    assert data["verified"] is (status == 0)
    assert (data["rows"], data["stages"], data["microbatches"], data["derived_rows"]) == (2, 2, 4, [])
    assert data["nodes"] > data["actions"] > 30
    assert data["compile_s"] > 0
    if status == 0:
        assert data["error"] is None
        assert err == ""
    else:
        assert one_line(err) == f"piper-search: error: {data['error']}\n"
        assert data["reason"] == "deadlock"
        assert data["context"].count("<-- here") >= 2
        assert data["verify_s"] is None


def test_json_of_what_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = check(capsys, str(tmp_path / "missing.yaml"), "--json")
    data = json.loads(out)
    assert status == 2
    assert data.keys() == KEYS
    assert (data["verified"], data["nodes"]) == (False, None)
    assert data["error"] in one_line(err)


def test_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """``--plan`` prints what is verified, as text that reads back equal."""
    _, short, _ = check(capsys, str(TEN_LINES))
    status, out, err = check(capsys, str(TEN_LINES), "--plan")
    assert (status, err) == (0, "")
    assert scrub(out).startswith(scrub(short))
    text = out[len(short) :].lstrip()
    strategy = load(TEN_LINES)
    plan = compile_program(strategy.program, base_dag(strategy), strategy.header.world).plan
    assert text == format_plan(parse_plan(text)) == format_plan(plan)
    status, out, _ = check(capsys, str(TEN_LINES), "--plan", "--json")
    data = json.loads(out)
    assert status == 0
    assert data.keys() == KEYS | {"plan", "grid"}
    assert data["plan"] == format_plan(plan)
    assert data["grid"] == short.splitlines()[-2:]
    assert (data["ranks"], data["gpus"]) == (2, 4)


@pytest.mark.parametrize(
    ("header", "note"),
    [
        ({"gpus": 4}, None),
        ({"gpus": 5}, "no placement names 1 of the 5 ranks: 4"),
        ({"mesh": "a=2,b=8"}, "no placement names 12 of the 16 ranks: 4, 5, 6, 7, 8, 9, 10, 11, ..."),
        ({"gpus": 1 << 16}, "no placement names 65,532 of the 65,536 ranks: 4, "),
    ],
)
def test_ranks_without_work(
    header: dict[str, Any], note: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = [{"op": "place", "filter": {"PP": row}, "devices": [2 * row, 2 * row + 1]} for row in (0, 1)]
    path = write(tmp_path, {"model": "dense:8", **header, "directives": [PIPELINE[0], *place, ORDER]})
    status, out, _ = check(capsys, path, "--json")
    assert status == 0
    found = [each for each in json.loads(out)["notes"] if each.startswith("no placement")]
    assert (len(found), all(each.startswith(note or "") for each in found)) == (int(note is not None), True)


@pytest.mark.parametrize("rows", [("0",), ("1",), ("0", "1"), ()])
def test_what_the_list_scheduler_completed(
    rows: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    order = [{"op": "order", "actions": {row: ORDER["actions"][row] for row in rows}}] if rows else []
    _, out, _ = check(capsys, write(tmp_path, [*PIPELINE, *order]), *DENSE)
    words = {(): "every row", ("0",): "row 1", ("1",): "row 0"}.get(rows)
    assert ("the list scheduler completed the order of " in out) == (words is not None)
    assert words is None or f"the list scheduler completed the order of {words}\n" in out


@pytest.mark.parametrize("model", ["nowhere/model", "config.json", "/no/such/config.json"])
def test_a_model_that_is_a_path(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, {"model": model, "directives": [*PIPELINE, ORDER]})
    status, _, err = check(capsys, path)
    assert status == 2
    assert "no such file or directory" in one_line(err)


@pytest.mark.parametrize("path", sorted((GOLDEN / "upstream").glob("*.json")), ids=lambda path: path.stem)
def test_upstream_arrays(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = check(capsys, str(path), "--synthetic", "moe:24", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["verified"]


@pytest.mark.parametrize("model", ["dense:24", "moe:24"])
def test_stages_are_those_the_file_names(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    four = [{"op": "place", "filter": {"PP": at}, "devices": [i]} for i, at in enumerate((0, [1], "2-3"))]
    path = write(tmp_path, [*PIPELINE[:1], *four])
    _, out, _ = check(capsys, path, "--synthetic", model, "--json")
    assert json.loads(out)["stages"] == 4
    status, _, err = check(capsys, path, "--synthetic", model, "--stages", "6")
    assert status == 2
    assert "stage 4" in one_line(err)


def test_a_strategy_of_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = load(TEN_LINES).to_data() | {"model": "llama3-8b"}
    data["directives"][0] = {"op": "stage", "stages": 2}
    status, out, _ = check(capsys, write(tmp_path, data), "--json")
    assert status == 0
    assert json.loads(out)["notes"] == []
    status, _, err = check(capsys, write(tmp_path, data), "--stages", "2")
    assert status == 2
    assert "synthetic" in one_line(err)


@pytest.mark.parametrize("path", sorted((GOLDEN / "strategy").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_grid_is_the_order(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Actions opened for their buckets print as the file has them, so that a line can be copied back."""
    status, out, _ = check(capsys, str(path))
    assert status == 0
    orders = [each for each in load(path).program.directives if isinstance(each, Order)]
    rows = [f"{row}: {format_slots(slots)}" for order in orders for row, slots in order.actions]
    assert rows
    assert out.splitlines()[-len(rows) :] == rows


def test_overlapping_actions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Actions whose parts take turns print in parentheses."""
    program = [
        {"op": "place", "filter": {}, "devices": [0, 1]},
        {"op": "shard", "filter": {"EP": "*"}, "devices": [0, 1], "stream": "ep"},
        {"op": "replicate", "filter": {}, "devices": [0, 1]},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 3},
        {"op": "order", "actions": {"0": "0F0 (0F1 0B0) (0B1 0F2) 0B2"}},
    ]
    status, out, _ = check(capsys, write(tmp_path, program), "--synthetic", "moe:2")
    assert status == 0
    assert out.splitlines()[-1] == "0: 0F0 (0F1 0B0) (0B1 0F2) 0B2"


@pytest.mark.parametrize("tag", ["PASS", "REGION", "COMM"])
def test_nothing_is_outside_a_pass(tag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    filters = [[{"PP": 0, "PASS": "F"}], [{"PP": 0, tag: None}]]
    status, _, err = check(capsys, write(tmp_path, [*PIPELINE, {"op": "order", "filters": filters}]), *DENSE)
    assert status == 2
    assert f"directive 4 of 4, order(...): unknown {tag} None" in re.sub(r"order\(.*?\):", "order(...):", one_line(err))


BAD = {
    "empty": b"",
    "blank": b" \n\n",
    "binary": bytes(range(256)),
    "image": b"\x89PNG\r\n\x1a\n" + b"\0" * 64,
    "latin": "directives: [é]".encode("latin-1"),
    "word": b"hello",
    "number": b"17",
    "unclosed": b'[{"op": "place"',
    "yaml": b"a: b: c",
    "tag": b"!!python/object/apply:os.system ['true']",
    "deep": b"[" * 100_000,
    "twice": b'[{"op": "split", "op": "place"}]',
    "op": b'[{"op": "fuse"}]',
    "null": b"null",
    "header": b'{"modle": "dense:8", "directives": []}',
    "huge": b"[" + b" " * (9 << 20) + b"]",
    "nobody": b'{"model": "gpt-17", "directives": []}',
    "escape": b'[{"op": "\x1b[31mred\\u0007\xe2\x80\xa8"}]',
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bad_files(name: str, suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(BAD[name])
    status, out, err = check(capsys, str(path))
    assert (status, out) == (2, "")
    assert one_line(err)[:-1].isprintable()


def test_what_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, tmp_path / "missing", fifo, Path("/dev/zero"), tmp_path / ("x" * 300), Path("a\0b")):
        status, out, err = check(capsys, str(path))
        assert (status, out) == (2, "")
        one_line(err)


def test_permission_denied(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("[]")

    def refuse(*_: object, **__: object) -> None:  # as chmod 0 would, were the tests not run by root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    status, out, err = check(capsys, str(path))
    assert (status, out) == (2, "")
    assert "Permission denied" in one_line(err)


# --- end to end ---


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nfrom search.cli import main\nsys.exit(main({list(words)!r}))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=cwd)


def test_processes(tmp_path: Path) -> None:
    done = command("check", str(TEN_LINES))
    assert (done.returncode, done.stderr) == (0, "")
    assert "0: 0F0 0F1 0B0" in done.stdout
    write(tmp_path, [*PIPELINE, DEADLOCK])
    done = command("check", "program.json", *DENSE, cwd=tmp_path)
    assert done.returncode == 2
    assert "deadlock: rows 0 and 1 wait for each other" in one_line(done.stderr)
    assert "<-- here" in done.stdout
    (tmp_path / "program.json").write_bytes(BAD["binary"])
    done = command("check", "program.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    one_line(done.stderr)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_check_loads_no_heavy_library(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"small{suffix}"
    path.write_text(TEN_LINES.read_text() if suffix == ".yaml" else json.dumps(load(TEN_LINES).to_data()))
    heavy = {"torch", "ray", "optuna", "networkx", "pydantic", "scipy", "numba", "ortools", "rich", "plotly", "typer"}
    program = (
        f"import sys\nfrom search.cli import main\nassert main(['check', {str(path)!r}]) == 0\n"
        f"print(*({heavy!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_nobody_reads() -> None:
    """A pipe that closes early ends the command quietly."""
    program = f"import sys\nfrom search.cli import main\nsys.exit(main(['check', {str(TEN_LINES)!r}]))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_stdout() -> None:
    program = f"import sys\nfrom search.cli import main\nsys.exit(main(['check', {str(TEN_LINES)!r}]))"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
