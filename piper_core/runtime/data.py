"""Global batches of tokens, made up or from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piper_core.errors import ConfigError

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""From the number of a step to (tokens, targets), each (sequences, length)."""


def synthetic(sequences: int, length: int, vocabulary: int, seed: int = 0) -> Batches:
    """Return batches of random tokens, whose targets are the tokens that follow."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((seed << 32) + number)
        return _cut(torch.randint(0, vocabulary, (sequences, length + 1), generator=generator))

    return batch


def from_file(path: Path, sequences: int, length: int, vocabulary: int, steps: range = range(0)) -> Batches:
    """Return batches of consecutive tokens of a file, over again from its start at its end: ``.npy``, one-dimensional
    integers, or ``.bin``, unsigned integers of 16 bits, as nanoGPT and Megatron's tools write them.

    Raises:
        ConfigError: another file, one that is too short, or a token out of range: now in what ``steps`` take, else at
            the step that meets it.
    """
    if path.suffix not in (".npy", ".bin"):
        raise ConfigError(f"--data {path}: the name must end in .npy or .bin")
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:160]
        raise ConfigError(f"--data {path}: cannot be read as tokens: {reason}") from None
    if not isinstance(tokens, np.ndarray):  # an archive of several
        raise ConfigError(f"--data {path}: expected one row of integers, found an archive")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(f"--data {path}: expected one row of integers, found {tokens.dtype} {tokens.shape}")
    need = sequences * length + 1
    if len(tokens) < need:
        raise ConfigError(f"--data {path}: {len(tokens):,} tokens, and one step takes {need:,}")
    turns = (len(tokens) - 1) // (sequences * length)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        start = number % turns * sequences * length
        part = torch.from_numpy(np.array(tokens[start : start + need], dtype=np.int64))
        least, most = int(part.min()), int(part.max())
        if least < 0 or most >= vocabulary:
            found = least if least < 0 else most
            raise ConfigError(f"--data {path}: token {found} is none of the model's, 0 to {vocabulary - 1}")
        return part[:-1].view(sequences, length).contiguous(), part[1:].view(sequences, length).contiguous()

    for number in steps[:turns]:  # later ones take the same again
        batch(number)
    return batch


def _cut(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
