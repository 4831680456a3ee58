"""What is no batch is refused before a rank sees it; what a file of tokens holds, before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from piper_core.errors import ConfigError
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy
from piper_core.runtime.data import from_file
from piper_core.runtime.trainer import Trainer
from tests.ray.strategies import MODEL, SEQ, pipeline


class StartedError(Exception):
    """A rank was called."""


class _NoRanks:
    """Stands where the processes of a run would."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ranks: list[int] = []

    def call(self, *_: Any) -> list[Any]:
        raise StartedError


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_core.runtime.trainer.Gang", _NoRanks)
    monkeypatch.setattr("ray.put", lambda batch: batch)


def ints(*shape: int, high: int = MODEL.vocab, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


EXPECTED = "a batch of this run is (tokens, targets): int64 of shape (2, 8), int64 of shape (2, 8); found "


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (ints(2, SEQ), EXPECTED + "int64 of shape (2, 8)"),
        ((), EXPECTED + "nothing"),
        ((ints(2, SEQ),) * 3, EXPECTED + "int64 of shape (2, 8), int64 of shape (2, 8), int64 of shape (2, 8)"),
        ((ints(2, SEQ), None), EXPECTED + "int64 of shape (2, 8), NoneType"),
        ((ints(2, SEQ), ints(2, SEQ).float()), EXPECTED + "int64 of shape (2, 8), float32 of shape (2, 8)"),
        ((ints(2, SEQ + 1),) * 2, EXPECTED + "int64 of shape (2, 9), int64 of shape (2, 9)"),
        ((ints(2, SEQ), ints(2)), EXPECTED + "int64 of shape (2, 8), int64 of shape (2,)"),
        ((torch.tensor(1),) * 2, EXPECTED + "int64 of shape (), int64 of shape ()"),
        ((ints(3, SEQ),) * 2, "the batch has 3 sequences; the strategy takes 2"),
        ((ints(2, SEQ) + MODEL.vocab, ints(2, SEQ)), "tokens are 0 to 31 for llama; found"),
        ((ints(2, SEQ) - MODEL.vocab, ints(2, SEQ)), "tokens are 0 to 31 for llama; found -"),
        ((ints(2, SEQ), ints(2, SEQ) + MODEL.vocab), "tokens are 0 to 31 for llama; found"),
    ],
)
def test_what_is_no_batch(batch: Tensor | Sequence[Tensor], said: str) -> None:
    trainer = Trainer(MODEL, pipeline())
    with pytest.raises(ConfigError) as error:
        trainer.step(batch)
    assert said in str(error.value)
    for good in ((ints(2, SEQ), ints(2, SEQ)), [ints(2, SEQ), torch.full((2, SEQ), -100)]):
        with pytest.raises(StartedError):
            trainer.step(good)


def test_a_batch_of_a_module() -> None:
    strategy = Strategy(Header(global_batch=4), Program.parse([
        {"op": "stage", "stages": 1}, {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "place", "filter": {}, "devices": [0]},
    ]))  # fmt: skip
    example = torch.randn(2, 3), torch.randn(2, 1)
    trainer = Trainer((torch.nn.Linear(3, 1), example), strategy, loss=torch.nn.functional.mse_loss)
    said = (
        r"the module's inputs: float32 of shape \(4, 3\), float32 of shape \(4, 1\); found float32 of shape \(4, 3\)$"
    )
    with pytest.raises(ConfigError, match=said):
        trainer.step(torch.randn(4, 3))
    with pytest.raises(ConfigError, match=r"found float32 of shape \(4, 2\), float32"):
        trainer.step((torch.randn(4, 2), torch.randn(4, 1)))
    with pytest.raises(StartedError):
        trainer.step((torch.randn(4, 3), torch.randn(4, 1)))


def saved(folder: Path, values: Any, name: str = "tokens.npy") -> Path:
    np.save(folder / "tokens.npy", np.asarray(values))
    return (folder / "tokens.npy").rename(folder / name)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros(20), r"expected one row of integers, found float64 \(20,\)"),
        (np.zeros((4, 5), int), r"expected one row of integers, found int64 \(4, 5\)"),
        (np.zeros(8, int), "8 tokens, and one step takes 9"),
        (np.arange(20), "token 16 is none of the model's, 0 to 9"),  # in the second step
        (-np.arange(20), "token -8 is none of the model's, 0 to 9"),
    ],
)
def test_tokens_that_do_not_do(values: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--data .*tokens.npy: {said}$"):
        from_file(saved(tmp_path, values), 2, 4, 10, range(3))


def test_files_that_hold_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "noise.npy").write_bytes(b"noise")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "tokens.txt").write_text("1 2 3")
    np.savez(tmp_path / "several.npz", np.zeros(20, int))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    for name, said in {
        "nothing.npy": "No such file or directory", "empty.npy": "cannot be read as tokens",
        "noise.npy": "cannot be read as tokens", "empty.bin": "cannot be read as tokens", "several.npy": "an archive",
        "tokens.txt": "the name must end in .npy or .bin",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"^--data .*{name}: .*{said}"):
            from_file(tmp_path / name, 2, 4, 10)


def test_steps_before_and_after_those_of_a_run_are_not_looked_at(tmp_path: Path) -> None:
    values = np.zeros(25, int)
    values[3] = 99
    path = saved(tmp_path, values)
    batches = from_file(path, 2, 4, 10, range(1, 3))
    assert batches(1)[0].shape == (2, 4)
    with pytest.raises(ConfigError, match="token 99"):
        batches(3)
    with pytest.raises(ConfigError, match="token 99"):
        from_file(path, 2, 4, 10, range(1, 4))
