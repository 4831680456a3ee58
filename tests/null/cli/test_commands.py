"""Options, the lists, and how commands end."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import profiler.cli
from piper_core.errors import ConfigError, ProgramError
from piper_core.program.write import replace_file
from profiler import console
from search.cli import main
from search.cli.app import DEFAULTS, parser
from search.cli.show import count


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "--model is missing"),
        ("--model llama9b", "--gpus is missing"),
        ("--gpus 8", "--model is missing"),
        ("--model llama9b --gpus 0", "integer of at least 1"),
        ("--model llama9b --gpus 8.5", "integer of at least 1"),
        ("--model llama9b --gpus -3", "integer of at least 1"),
        ("--model llama9b --gpus 8 --top x", "integer of at least 1"),
        ("--model llama9b --gpus 8 --budget nan", "positive number of seconds"),
        ("--model llama9b --gpus 8 --budget -1", "positive number of seconds"),
        ("--model llama9b --gpus 8 --fix", "--fix"),
        ("--model llama9b --gpu 8", "invalid choice"),
        ("--bad", "unrecognized arguments: --bad"),
        ("chekc", "invalid choice: 'chekc'"),
        ("check", "FILE"),
        ("check a b", "unrecognized arguments: b"),
        ("check a --stages 0", "integer of at least 1"),
        ("--model llama9b check a", "--model is an option of the search, not of piper-search check"),
        ("--budget 3 models", "--budget is an option of the search"),
        ("--out there clusters", "--out is an option of the search"),
        ("--global-batch 4 clusters", "--global-batch is an option of the search, not of piper-search clusters"),
        ("--seed 0 models", "--seed is an option of the search"),
        ("--model llama9b --gpus \u0663\u0662", "integer of at least 1"),
        ("--model llama9b --gpus 8 --seq-len=\u0663", "integer of at least 1"),
        ("--model llama9b --gpus 8 --seed 1_0", "must be an integer"),
        ("--model llama9b --gpus 8 --seed -1", "must be an integer from 0 to 4294967295, found '-1'"),
        ("run a.yaml --seed 4294967296", "must be an integer from 0 to 4294967295"),
        ("refine a.yaml --seed -1", "must be an integer from 0 to 4294967295"),
        ("--model llama9b --gpus 8 --budget \u0663", "positive number of seconds"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_usage_errors(words: str, reason: str, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*(["--json"] if as_json else []), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("piper-search: error: ")
    assert err.count("\n") == 1
    assert reason in err
    if as_json:
        assert json.loads(out) == {"error": err.removeprefix("piper-search: error: ")[:-1]}
    else:
        assert out == ""


@pytest.mark.parametrize(
    "words",
    ["--model tiny-llama --gpus 2 --out ''", "--model tiny-llama --gpus 2 --resume ''", "report out -o ''", "check ''",
     "export s.yaml --to csv -o ''", "refine s.yaml -o ''", "predict --timeline ''", "validate --out ''"],
)  # fmt: skip
def test_no_name(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty name is not the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "must name a file or a folder, found ''" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".", "/", "there"])
def test_a_folder_where_a_file_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(ProgramError, match="cannot write the file: it is a folder; name a file in it"):
        replace_file(Path(name), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_largest_seed() -> None:
    assert parser().parse_args(["--seed", "4294967295"]).seed == 2**32 - 1


def test_options_of_the_search() -> None:
    words = "--model llama9b --gpus 32 --fix pp=4 tp=2 --fix dp=4 --cluster p4d --seed 7 --budget 2.5 --out there"
    options = parser().parse_args(words.split())
    assert (options.model, options.gpus, options.fix) == ("llama9b", 32, ["pp=4", "tp=2", "dp=4"])
    assert (options.global_batch, options.seq_len, options.top, options.seed) == (None, None, None, 7)
    assert DEFAULTS == {"cluster": "p4de", "global_batch": 512, "seq_len": 4096, "top": 10, "seed": 0}
    assert (options.budget, options.cluster, str(options.out), options.json) == (2.5, "p4d", "there", False)


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["check", "--help"], ["models", "-h"], ["clusters", "-h"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: piper-search")
    assert err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"piper-search \d+\.\d+\.\d+\n", out)
    assert err == ""


def test_trace_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not in the cache needs torch; that it is missing is no fault of ours."""
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["trace", "--model", "piper-1b"]) == 2
    assert capsys.readouterr() == ("", "piper-search: error: trace needs torch: make setup installs it\n")


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"^llama9b +8\.\d+ B", out, re.MULTILINE)
    assert main(["models", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["llama3-8b"]["parameters"] == pytest.approx(8.03e9, rel=1e-3)


def test_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"^p4de +A100-SXM-80GB +79", out, re.MULTILINE)
    assert main(["--json", "clusters"]) == 0
    assert json.loads(capsys.readouterr().out)["p4d"]["gpus_per_node"] == 8


def test_profile_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    """Every number comes with its source."""
    assert profiler.cli.main(["clusters"]) == 0
    everything, _ = capsys.readouterr()
    assert profiler.cli.main(["clusters", "p4de", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["p4de"]
    assert data["device.matmul_flops"]["value"] == 312e12
    assert all(entry["source"] and entry["source"] in everything for entry in data.values())
    assert profiler.cli.main(["--help"]) == 0
    assert "Measure what the chunks of a model" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["clusters", "p4"], ["clusters", ""], ["clusters", "none.json"], ["measure"]])
def test_profile_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert profiler.cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("piper-profile: error: ")
    assert err.count("\n") == 1


# --- how a command ends ---


def ends(error: BaseException | None) -> int:
    """Run a command that raises."""

    def body(_: Namespace) -> int:
        if error is not None:
            raise error
        return 0

    def build() -> console.Parser:
        made = console.Parser(prog="thing")
        made.set_defaults(run=body)
        return made

    return console.run("thing", build, [])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (None, 0, ""),
        (ConfigError("two\nlines"), 2, "thing: error: two lines\n"),
        (KeyboardInterrupt(), 130, "thing: error: interrupted\n"),
        (ValueError("a\nb"), 1, "thing: error: ValueError: a b; PIPER_TRACEBACK=1 shows where it happened\n"),
    ],
)
def test_ends(error: BaseException | None, status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(error) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("2.5s", 2.5), ("2m", 120), ("1h", 3600), (".5", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert console.duration_s(text) == seconds


def test_a_full_disk() -> None:
    """What cannot be written is said in one line."""
    code = "import sys\nfrom search.cli import main\nsys.exit(main(['models']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "piper-search: error: cannot write the output: No space left on device\n"
    assert done.returncode == 2


def test_a_fault_of_ours_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="ours"):
        ends(ValueError("ours"))


def test_table() -> None:
    assert console.table(("name", "n"), [("a", "1"), ("bcdef", "22")]).splitlines() == [
        "name    n",
        "a       1",
        "bcdef  22",
    ]


def test_count() -> None:
    assert [count(n, "microbatch", "es") for n in (1, 2, 1024)] == [
        "1 microbatch",
        "2 microbatches",
        "1,024 microbatches",
    ]


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the grid is coloured and cut to its width."""
    from piper_core import compile_program, load, synthetic, training_dag
    from search.cli import show
    from tests.null.cli.test_check import TEN_LINES

    strategy = load(TEN_LINES)
    plan = compile_program(strategy.program, training_dag(synthetic("dense:8")), strategy.header.mesh).plan
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setenv("COLUMNS", "20")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        coloured = show.show_grid(plan)
        monkeypatch.setenv("NO_COLOR", "1")
        plain = show.show_grid(plan)
        monkeypatch.undo()
    os.close(ours)
    assert plain.splitlines()[0] == "0: 0F0 0F1 0B0 0 ..."
    assert max(map(len, plain.splitlines())) == 20
    assert coloured.startswith("0: \x1b[34m0F0\x1b[0m ")
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
