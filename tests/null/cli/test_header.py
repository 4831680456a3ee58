"""A header that no command can serve is refused by every command, in the same words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piper_core.errors import ConfigError
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy, base_dag, dump
from search.cli import main

HEADER = Header(model="tiny-llama", cluster="cpu", mesh=Mesh((("pp", 1),)), global_batch=2, seq_len=128)
COMMANDS = {
    "check": ("check", "FILE"),
    "predict": ("predict", "FILE"),
    "predict with a kernel": ("predict", "FILE", "--attention", "flash1"),
    "diff": ("diff", "FILE", "FILE"),
    "refine": ("refine", "FILE", "--budget", "1s"),
    "export": ("export", "FILE", "--to", "csv"),
    "run": ("run", "FILE"),
    "rehearsal": ("run", "FILE", "--ranks", "virtual"),
}


def strategy(**changes: object) -> Strategy:
    program = [{"op": "stage", "stages": 1}, {"op": "place", "filter": {}, "devices": [0]}]
    return Strategy(replace(HEADER, **changes), Program.parse(program))  # type: ignore[arg-type]  # fields of a header


def refused(words: tuple[str, ...], made: Strategy, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = folder / "s.yaml"
    dump(made, file)
    assert main([str(file) if word == "FILE" else word for word in words]) == 2
    assert [path.name for path in folder.iterdir()] == ["s.yaml"]
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("seq_len", "said"),
    [
        (4096, "header field seq_len: 4096 is longer than tiny-llama allows: at most 2048"),
        (None, "a header without seq_len means 4096, which is longer than tiny-llama allows: at most 2048"),
    ],
)
def test_a_sequence_that_the_model_does_not_take(
    words: tuple[str, ...], seq_len: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(words, strategy(seq_len=seq_len), tmp_path, capsys) == f"piper-search: error: {said}"


def test_the_longest_sequence_is_taken() -> None:
    assert base_dag(strategy(seq_len=2048)).model.seq_len == 2048
    with pytest.raises(ConfigError, match="at most 2048"):
        base_dag(strategy(seq_len=2049))


@pytest.mark.parametrize("name", ["check", "diff", "refine", "export", "run", "rehearsal"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [({"cluster": "p4dd"}, "unknown cluster 'p4dd'"), ({"schedule": "1f2b"}, "header field schedule: ")],
)
def test_an_unknown_name(
    name: str, changes: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(COMMANDS[name], strategy(**changes), tmp_path, capsys)


@pytest.mark.parametrize("name", ["check", "diff", "refine", "export", "run", "rehearsal"])
@pytest.mark.parametrize(
    ("predicted", "said"),
    [
        ({"step_time_s": 0}, "header field predicted: step_time_s must be above 0, found 0; leave it out"),
        ({"step_time_s": -1.5}, "step_time_s must be above 0, found -1.5"),
        ({"step_time_s": 1.0, "peak_memory_bytes": [5, -1]}, "peak_memory_bytes must be above 0, found -1"),
    ],
)
def test_a_prediction_that_none_makes(
    name: str, predicted: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(COMMANDS[name], strategy(predicted=predicted), tmp_path, capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_strategy_for_another_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    made = strategy()
    other = Program.parse(
        [{"op": "stage", "layers_per_stage": [9]}, *(each.to_data() for each in made.program.directives[1:])]
    )
    assert "layers_per_stage adds up to 9 of 8 layers" in refused(
        COMMANDS[name], replace(made, program=other), tmp_path, capsys
    )
