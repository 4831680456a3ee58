"""The main command: what it prints and writes, how it refuses, what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from piper_core.arch import model_chunks, preset
from piper_core.program.strategy import base_dag, load
from piper_core.schedule.compile import compile_program
from profiler.spec import HARDWARE, load_cluster
from search.cli import main
from search.cost import RooflineCost
from search.evaluate import evaluate

SMALL = ["--model", "piper-1b", "--gpus", "8", "--global-batch", "16", "--seq-len", "1024", "--execute", "0"]
FIXED = [*SMALL, "--fix", "schedule=1f1b,zbv", "tp=1,2", "recompute=none", "ep=1,2"]
NUMBER = (int, float)
WRITTEN = {
    "best.strategy.yaml", "candidates.jsonl", "optuna.journal", "result.json", "report.html", "timeline.perfetto.json"
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The JSON of one search, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("search") / "new" / "out"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", *FIXED, "--json",
         "--top", "7", "--seed", "3", "--out", str(folder)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout), folder


def test_json_keys_and_types(made: tuple[dict[str, Any], Path]) -> None:
    data, folder = made
    assert set(data) >= {"best", "candidates", "pareto", "space", "proof_gap", "wall_s", "seed"}
    assert data["seed"] == 3
    assert isinstance(data["wall_s"], float)
    assert data["family_gap"] == 0
    assert 0 <= data["proof_gap"] < 0.2
    space = data["space"]
    assert set(space) == {"size", "pruned", "simulated"}
    assert all(isinstance(n, int) and n > 0 for n in space["pruned"].values())
    assert 0 < space["simulated"] <= space["size"]
    assert len(data["candidates"]) == 7
    assert data["candidates"][0] == data["best"]
    ids = [candidate["id"] for candidate in data["candidates"]]
    assert len(set(ids)) == len(ids)
    assert data["pareto"][0] == data["best"]["id"]
    assert set(data["pareto"]) <= set(ids)
    for candidate in data["candidates"]:
        degrees = candidate["degrees"]
        assert set(degrees) == {"pp", "tp", "dp", "ep", "cp", "virtual_stages"}
        assert all(isinstance(size, int) and size >= 1 for size in degrees.values())
        assert degrees["pp"] * degrees["tp"] * degrees["dp"] * degrees["cp"] == 8
        assert candidate["micro_batch"] * candidate["num_microbatches"] * degrees["dp"] == 16
        assert candidate["zero_stage"] in range(4)
        assert candidate["schedule"] in ("1f1b", "zbv")
        assert candidate["recompute"] == "none"
        assert candidate["cuts"] in ("balanced", "even")
        assert sum(candidate["layers_per_stage"]) == 16
        assert len(candidate["layers_per_stage"]) == degrees["pp"] * degrees["virtual_stages"]
        assert candidate["measured"] is None
        predicted = candidate["predicted"]
        for key in ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "margin_bytes",
                    "bubble_ratio"):  # fmt: skip
            assert isinstance(predicted[key], NUMBER), key
        assert predicted["fits"] == "yes"
        assert len(predicted["peak_memory_bytes"]) == len(predicted["memory"]) == degrees["pp"]
        for key in ("breakdown", "exposed_communication_s"):
            assert all(isinstance(value, NUMBER) for value in predicted[key].values())
        assert sum(predicted["breakdown"].values()) == pytest.approx(predicted["step_time_s"])
    assert data["best"]["strategy_file"] == str(folder / "best.strategy.yaml")
    assert all(candidate["strategy_file"] is None for candidate in data["candidates"][1:])
    steps = [candidate["predicted"]["step_time_s"] for candidate in data["candidates"]]
    assert steps == sorted(steps)


def test_the_file_passes_check_and_is_worth_what_it_says(
    made: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = made
    assert {path.name for path in folder.iterdir()} == WRITTEN
    path = folder / "best.strategy.yaml"
    assert main(["check", str(path)]) == 0
    assert "verified" in capsys.readouterr().out
    strategy = load(path)
    header = strategy.header
    compiled = compile_program(strategy.program, base_dag(strategy), header.world)
    cluster = load_cluster(str(header.cluster))
    again = evaluate(
        compiled, RooflineCost(cluster), cluster.device, seq_len=1024, gpus=8, global_batch=16,
        architecture=preset("piper-1b"),
    )  # fmt: skip
    assert again.step_time_s == pytest.approx(data["best"]["predicted"]["step_time_s"], rel=1e-12)
    assert list(again.peak_memory_bytes) == pytest.approx(data["best"]["predicted"]["peak_memory_bytes"])
    assert header.predicted["step_time_s"] == pytest.approx(again.step_time_s, abs=1e-6)
    assert (header.gpus, header.global_batch, header.seq_len) == (8, 16, 1024)
    assert len(compiled.dag.chunks) == len(model_chunks(preset("piper-1b"), 1024).chunks)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FIXED, "--top", "3", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in out.splitlines()]
    assert err == ""
    assert lines[0] == "piper-1b on 8 GPUs of p4de, global batch 16, sequence 1024"
    assert " wins: " in lines[1]
    assert "the runner-up" in lines[1]
    columns = next(line for line in lines if "tok/s/GPU" in line).split()
    assert columns[:6] == ["#", "pp", "tp", "dp", "cp", "ep"]
    ranks = [words[0] for words in map(str.split, lines) if len(words) > 15 and "".join(words[:4]).isdecimal()]
    assert ranks == ["1", "2", "3"]
    text = "\n".join(lines)
    for words in ("layers per stage of the best", "space: N = ", "lowered and simulated", "proof gap",
                  f"written: {tmp_path / 'best.strategy.yaml'}"):  # fmt: skip
        assert words in text
    assert {path.name for path in tmp_path.iterdir()} == WRITTEN


@pytest.mark.parametrize(("width", "colour"), [(70, True), (70, False), (300, False)])
def test_on_a_terminal(
    width: int, colour: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table is as wide as the terminal, and says what is missing; NO_COLOR takes bold type and the bar away."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    done = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", *FIXED, "--top", "3",
         "--out", str(tmp_path)],
        stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    got = b""
    with suppress(OSError):  # how a terminal says that nobody writes any more
        while more := os.read(ours, 1 << 16):
            got += more
    os.close(ours)
    assert done.wait() == 0
    text = got.decode().replace("\r\n", "\n")
    assert ("\x1b[1m" in text, "searching" in text) == (colour, colour)
    if not colour:
        assert "\x1b" not in text
        assert "\r" not in text
    rows = [line for line in text.splitlines() if re.match(r" *\d  ", line)]
    assert len(rows) == 3
    assert max(map(len, rows)) <= width
    assert ("left out of the table for want of width: tok/s/GPU, margin, " in text) == (width == 70)


def test_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", *FIXED, "--out",
         str(tmp_path)],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_model_and_a_cluster_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strategy names their whole paths, and so can be checked in any folder."""
    (tmp_path / "mine").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
              "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 4096, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 2048, "hidden_act": "silu"}  # fmt: skip
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    shutil.copy(HARDWARE / "p4de.cluster.json", tmp_path / "own.json")
    monkeypatch.chdir(tmp_path)
    words = [
        "--gpus",
        "2",
        "--global-batch",
        "4",
        "--seq-len",
        "512",
        "--cluster",
        "own.json",
        "--out",
        "out",
        "--execute",
        "0",
    ]
    assert main(["--model", "mine", *words]) == 0
    header = load("out/best.strategy.yaml").header
    assert (header.model, header.cluster) == (str(tmp_path / "mine"), str(tmp_path / "own.json"))
    monkeypatch.chdir("/")
    assert main(["check", str(tmp_path / "out" / "best.strategy.yaml")]) == 0
    assert "verified" in capsys.readouterr().out


def test_the_same_file_twice(made: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = made
    path = tmp_path / "best.strategy.yaml"
    path.write_text("what stood here before")
    assert main([*FIXED, "--json", "--out", str(tmp_path)]) == 0
    assert path.read_text() == (folder / "best.strategy.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--gpus 0", "integer of at least 1"),
        ("--gpus -8", "integer of at least 1"),
        ("--gpus 37", "no pp x tp x cp x dp makes 37 GPUs"),
        ("--gpus 8 --global-batch 0", "integer of at least 1"),
        ("--gpus 8 --global-batch 3 --fix dp=8", "leaves no configuration on 8 GPUs"),
        ("--gpus 8 --global-batch 9 --fix dp=4", "; dp could be 1"),
        ("--gpus 8 --seq-len 1048576", "longer than"),
        ("--model gpt3-175b --gpus 8 --seq-len 4096", "at most 2048"),
        ("--model gpt5 --gpus 8", "unknown model"),
        ("--gpus 8 --cluster p9", "unknown cluster"),
        ("--gpus 8 --cluster nowhere.json", "No such file"),
        ("--gpus 8 --fix pp", "axis=value"),
        ("--gpus 8 --fix pp=x", "pp takes an integer"),
        ("--gpus 8 --fix stage=2", "no axis"),
        ("--gpus 8 --fix pp=2 pp=4", "twice"),
        ("--gpus 8 --fix pp=3", "leaves no configuration on 8 GPUs"),
        ("--gpus 8 --fix pp=4 dp=4", "leaves no configuration on 8 GPUs"),
        ("--gpus 8 --fix pp=1 schedule=zbv", "leaves no configuration"),
        ("--model llama3-405b --gpus 8 --cluster p4d", "GiB short"),
    ],
)
def test_refusals(words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, last on stderr; exit status 2; nothing written."""
    arguments = words.split()
    if "--model" not in arguments:
        arguments = ["--model", "llama9b", *arguments]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("these conflict: ") if reason == "GiB short" else out == ""
    assert err.startswith("piper-search: error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert not list(tmp_path.iterdir())


def test_what_is_short_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama3-405b", "--gpus", "8", "--cluster", "p4d", "--json", "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] in err
    need = float(err.partition(" needs ")[2].split()[0])
    short = float(err.partition("the nearest is ")[2].split()[0])
    capacity = load_cluster("p4d").device.memory_bytes / 2**30
    assert short == pytest.approx(need - capacity, abs=0.11)
    # 405 billion parameters, 18 bytes each, on 8 GPUs
    assert need == pytest.approx(405e9 * 18 / 8 / 2**30, rel=0.01)
    assert f"fits {capacity:.1f} GiB a GPU" in err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below", file / "further" / "below"):
        assert main([*SMALL, "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"piper-search: error: --out {out} cannot be made: ")
        assert err.count("\n") == 1
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    try:
        for out in (tmp_path, tmp_path / "below"):
            assert main([*SMALL, "--out", str(out)]) == 2
            assert "is not writable" in capsys.readouterr().err
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_cannot_be_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "best.strategy.yaml" / "inside").mkdir(parents=True)
    assert main([*FIXED, "--fix", "pp=1", "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "cannot write the file" in err
    assert {path.name for path in tmp_path.iterdir()} <= {"best.strategy.yaml", "candidates.jsonl", "optuna.journal"}
    assert [path.name for path in (tmp_path / "best.strategy.yaml").iterdir()] == ["inside"]


INTERRUPTED = """
import os, signal, sys
from search.cli import main
from search.generators.best_first import BestFirst
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the tests with & leaves it ignored
after, sent = int(sys.argv.pop(1)), []
ask = BestFirst.ask

def ask_and_stop(self, *arguments):
    if self.asked >= after and not sent:
        sent.append(True)
        os.killpg(0, signal.SIGINT)  # as a terminal does: the workers get it too
    return ask(self, *arguments)

BestFirst.ask = ask_and_stop
sys.exit(main())
"""


@pytest.mark.parametrize("after", [0, 16])
def test_an_interrupt(after: int, tmp_path: Path) -> None:
    """The best so far with status 0, or 130 where there is none; and no process is left."""
    search = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(after), *SMALL, "--budget", "600", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    out, err = search.communicate(timeout=180)
    with pytest.raises(ProcessLookupError):
        os.killpg(search.pid, 0)
    if after:
        assert search.returncode == 0
        assert err == ""
        assert "(interrupted)" in out
        assert " wins: " in out
        assert main(["check", str(tmp_path / "out" / "best.strategy.yaml")]) == 0
        assert {path.name for path in (tmp_path / "out").iterdir()} == WRITTEN - {"optuna.journal"}
    else:
        assert search.returncode == 130
        assert (out, err) == ("", "piper-search: error: interrupted\n")
        assert not list(tmp_path.iterdir())
