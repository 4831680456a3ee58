"""Cases on real gloo processes, each a rank."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from piper_core.runtime.gloo import GlooCommunicator
from piper_core.runtime.program import Training
from tests.torch_cpu.parallel.ranks import on_ranks
from tests.torch_cpu.runtime.cases import Case, lowering, train

Cases = list[tuple[Case, Training]]


def train_in_forks(size: int, store: str, cases: Cases, steps: int) -> list[list[Any]]:
    """Return what each of ``size`` processes has of each case (None where it has no part); call it in a process apart,
    whose captures the forks share."""
    torch.set_num_threads(1)
    for case, _ in cases:
        for row in range(case.pp):
            lowering(case, torch.float64).table(row)
    return [pickle.loads(each) for each in on_ranks(_train_all, size, store, cases, steps)]


def _train_all(rank: int, cases: Cases, steps: int) -> bytes:
    """Be one rank; tensors are pickled here, since a pipe would share their memory with a process that ends."""
    communicator = GlooCommunicator()
    try:
        made = [train(case, training, communicator, steps) if rank < case.ranks else None for case, training in cases]
        return pickle.dumps(made)
    finally:
        communicator.close()
