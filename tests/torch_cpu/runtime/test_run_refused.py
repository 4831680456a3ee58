"""``piper-search run``: what it refuses before any process is started."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch._inductor import config as inductor

from piper_core.errors import ConfigError
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy, dump
from piper_core.runtime.checkpoint import begin, commit
from piper_core.runtime.trainer import Trainer
from search.cli import main
from search.cli.run_report import NOT_COMPARED, show
from tests.ray.strategies import MODEL, pipeline, sharded

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A strategy for two ranks, of which none may start."""
    monkeypatch.setattr("piper_core.runtime.trainer.Gang", lambda *_, **__: pytest.fail("started"))
    strategy, config, path = pipeline(), tmp_path / "config.json", tmp_path / "two.yaml"
    config.write_text(json.dumps(CONFIG))
    dump(replace(strategy, header=replace(strategy.header, model=str(config), cluster="cpu")), path)
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["run", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("data", "x.npy"), ("load", "kept"), ("save", "kept"), ("address", "auto"), ("timeline", "step.html"),
        ("dtype", "float64"), ("lr", "0.1"), ("clip", "1"), ("timeout", "5s"), ("device", "cuda"), ("compile", None),
    ],
)  # fmt: skip
def test_what_a_rehearsal_cannot_do(
    option: str, value: str | None, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, file, "--ranks", "virtual", f"--{option}", *([] if value is None else [value]))
    assert line == (
        f"piper-search: error: --{option} has no place in a rehearsal (as asked for), which trains a small double in "
        "float64 on tokens of its own and keeps nothing; leave it out, or use --ranks real"
    )
    assert {path.name for path in file.parent.iterdir()} == {"config.json", "two.yaml"}


def test_nor_where_there_are_too_few_devices(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.execute.enough", lambda *_, **__: False)
    line = refused(capsys, file, "--save", file.with_name("kept"))
    assert "--save has no place in a rehearsal (this machine has fewer cpu devices than its 2 ranks)" in line


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (None, "cannot be read as tokens: No such file or directory"),
        (np.zeros(99), "expected one row of integers, found float64 (99,)"),
        (np.full(99, 32), "token 32 is none of the model's, 0 to 31"),
        (np.full(99, -1), "token -1 is none of the model's, 0 to 31"),
        (np.zeros(16, int), "16 tokens, and one step takes 17"),
    ],
)
def test_data_that_does_not_do(
    values: np.ndarray | None, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = file.with_name("tokens.npy")
    if values is not None:
        np.save(data, values)
    line = refused(capsys, file, "--ranks", "real", "--data", data)
    assert line == f"piper-search: error: --data {data}: {said}"


def test_a_checkpoint_that_does_not_do(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.with_name("kept")
    assert "holds no whole checkpoint" in refused(capsys, file, "--ranks", "real", "--load", folder)
    commit(begin(folder, 1), {"steps": 1, "model": "other", "optimizer": "AdamW"})
    line = refused(capsys, file, "--ranks", "real", "--load", folder)
    _, said, name = line.partition(" is of model other, this run has ")
    assert said
    commit(begin(folder, 2), {"steps": 2, "model": name, "optimizer": "AdamW"})
    assert "is broken: its list of parts cannot be read" in refused(capsys, file, "--ranks", "real", "--load", folder)


def test_nowhere_to_save(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = refused(capsys, file, "--ranks", "real", "--save", file / "kept")
    assert line == (
        f"piper-search: error: cannot write a checkpoint to {file / 'kept'}: {file} is no folder; name another folder"
    )
    monkeypatch.setattr("piper_core.runtime.checkpoint.os.access", lambda path, _: path != file.parent)
    line = refused(capsys, file, "--ranks", "real", "--save", file.with_name("new") / "kept")
    assert line.endswith(f"{file.parent} cannot be written to; name another folder")
    assert not file.with_name("new").exists()


def test_what_cannot_be_compiled(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with inductor.patch("cpp.cxx", ("no-such-compiler",)):  # monkeypatch would leave it hidden
        line = refused(capsys, file, "--ranks", "real", "--compile")
    assert "Inductor found no C++ compiler on this machine; install g++" in line


def test_experts_that_ranks_divide_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_core.runtime.trainer.Gang", lambda *_, **__: pytest.fail("started"))
    strategy = sharded(0)
    shard = {"op": "shard", "filter": {"EP": "*"}, "axis": "dp", "kind": "expert"}
    data = strategy.program.to_data()
    program = Program.parse([*data[:-1], shard, data[-1]])
    mixture = replace(MODEL, ffn=0, experts=4, top_k=2, expert_ffn=16)
    with pytest.raises(ConfigError, match="experts that ranks divide need compiler 'none'"):
        Trainer(mixture, Strategy(strategy.header, program), compiler="inductor")
    with pytest.raises(ConfigError, match="compiler must be none or inductor, found 'nvcc'"):
        Trainer(MODEL, sharded(0), compiler="nvcc")  # type: ignore[arg-type]  # what is refused


def test_a_timeline_of_one_step(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, file, "--ranks", "real", "--steps", 1, "--timeline", file.with_name("step.html"))
    assert "--timeline needs two steps or more" in line


@pytest.mark.parametrize("reason", [None, NOT_COMPARED])
def test_a_ratio_only_where_it_means_something(reason: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Namespace(rank=0, peak_bytes=2**20, peak_by_action={"0F0": 2**20})
    data = {
        "step_time_s": 2.0, "step_times_s": [2.0], "predicted_step_time_s": None if reason else 1.0, "check": [],
        "not_compared": reason, "kept_in": None, "checkpoint": None,
    }  # fmt: skip
    show(data, [Namespace(ranks=[rank], timeline=None)], Namespace(run_timeline=None))  # type: ignore[list-item]  # a double
    line = capsys.readouterr().out.splitlines()[0]
    if reason is None:
        assert line == "step time 2 s (median of 1, 2 to 2); predicted 1 s, measured / predicted 2.00"
    else:
        assert line == f"step time 2 s (median of 1, 2 to 2); {reason}"
        assert "predicted" not in line
