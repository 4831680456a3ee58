"""``piper-search run``: what it refuses before anything heavy is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy, dump
from search.cli import main

STRATEGY = Strategy(Header(mesh=Mesh((("dp", 2),)), global_batch=2, seq_len=8), Program(()))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["run", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (None, [], "model none has no weights to train; give the header a preset or a config.json"),
        ("dense:4", [], "model dense:4 has no weights to train"),
        ("tiny-lama", [], "unknown model 'tiny-lama'; the nearest names are tiny-llama"),
        ("tiny-llama", ["--lr", "-1"], "argument --lr: must be a number above 0, found '-1'"),
        ("tiny-llama", ["--steps", "0"], "must be an integer of at least 1"),
        ("tiny-llama", ["--timeline", "step.png"], "the name must end in .html, .svg, .json"),
        ("tiny-llama", ["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_refused(
    model: str | None, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.yaml"
    dump(replace(STRATEGY, header=replace(STRATEGY.header, model=model)), file)
    assert said in refused(capsys, file, *options)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.yaml" in refused(capsys, tmp_path / "nothing.yaml")


def test_execute_is_an_option_of_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--execute", "2", "run", "s.yaml"]) == 2
    assert "--execute is an option of the search" in capsys.readouterr().err
    assert main(["--execute", "x", "--model", "tiny-llama", "--gpus", "2"]) == 2
    assert "must be an integer of at least 1, or 0 for none, found 'x'" in capsys.readouterr().err
    assert main(["--execute", "-1", "--model", "tiny-llama", "--gpus", "2"]) == 2
    assert "must be an integer of at least 1, or 0 for none, found '-1'" in capsys.readouterr().err
