"""Strategies on a tiny model for a few real ranks, and what they leave behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper_core.arch.record import Architecture
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy
from piper_core.runtime.trainer import Trainer

MODEL = Architecture("llama", 2, 16, 32, 4, 4, 4, 32)
RANKS, SEQ = 2, 8


def pipeline(m: int = 2) -> Strategy:
    """Two stages, 1F1B."""
    places = [{"op": "place", "filter": {"PP": s}, "devices": [s]} for s in range(2)]
    orders = {"0": _one_f_one_b(0, m), "1": _one_f_one_b(1, m)}
    return _strategy(
        Mesh((("pp", 2),)), m, [{"op": "stage", "stages": 2}, *places, {"op": "order", "actions": orders}], m
    )


def sharded(zero: int, m: int = 2) -> Strategy:
    """Two data ranks, ZeRO-``zero``."""
    flags = {"shard_optimizer": zero == 1, "shard_grads": zero >= 2, "shard_params": zero == 3}
    data: list[dict[str, Any]] = [
        {"op": "stage", "stages": 1},
        {"op": "place", "filter": {}, "devices": [0, 1]},
        {"op": "replicate", "filter": {}, "axis": "dp"} | {name: True for name, value in flags.items() if value},
        {"op": "order", "actions": {"0": " ".join(f"0F{i} 0B{i}" for i in range(m))}},
    ]
    return _strategy(Mesh((("dp", 2),)), m, data, 2 * m)


def divided(m: int = 4) -> Strategy:
    """Two tensor ranks."""
    data: list[dict[str, Any]] = [
        {"op": "stage", "stages": 1},
        {"op": "place", "filter": {}, "devices": [0, 1]},
        {"op": "shard", "filter": {}, "axis": "tp", "kind": "tensor"},
        {"op": "order", "actions": {"0": " ".join(f"0F{i} 0B{i}" for i in range(m))}},
    ]
    return _strategy(Mesh((("tp", 2),)), m, data, m)


def _strategy(mesh: Mesh, m: int, data: list[dict[str, Any]], batch: int) -> Strategy:
    split = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m}
    header = Header(mesh=mesh, global_batch=batch, seq_len=SEQ, micro_batch=1)
    return Strategy(header, Program.parse([data[0], split, *data[1:]]))


def _one_f_one_b(stage: int, m: int) -> str:
    warm = [f"{stage}F{i}" for i in range(1 - stage)]
    rest = [f"{stage}F{i + 1 - stage} {stage}B{i}" for i in range(m - 1 + stage)]
    tail = [f"{stage}B{m - 1}"] if stage == 0 else []
    return " ".join([*warm, *rest, *tail])


def batch(trainer: Trainer, number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    size = trainer.slicing.batch
    tokens, targets = (torch.randint(0, MODEL.vocab, (size, SEQ), generator=generator) for _ in range(2))
    return tokens, targets


def runs(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def traces() -> set[str]:
    """Return what a run could leave: files in shared memory, and folders of our sessions."""
    import tempfile

    ours = Path(tempfile.gettempdir()).glob(f"piper-ray-{os.getpid()}-*")
    return {*os.listdir("/dev/shm"), *(path.name for path in ours)}
