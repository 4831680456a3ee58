"""All that one rank compares, in one process: starting it takes longer than most of the comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from piper_core.arch.contract import Method
from piper_core.arch.record import Architecture
from tests.torch_cpu.parallel.divided import captured, tensor_parallel
from tests.torch_cpu.parallel.exchanged import context_parallel, expert_parallel


@dataclass(frozen=True, slots=True)
class Cases:
    """Models divided by tensor and sequence, (mixture, routing), (model, context method)."""

    tensor: tuple[Architecture, ...] = ()
    expert: tuple[tuple[Architecture, str], ...] = ()
    context: tuple[tuple[Architecture, Method], ...] = ()


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors, see the functions of the same names."""

    tensor: dict[tuple[str, bool, bool], tuple[float, float]]
    expert: dict[tuple[str, str], tuple[float, float, list[int], float]]
    context: dict[tuple[str, str, str], tuple[float, float]]


def compare(rank: int, size: int, store: str, cases: Cases) -> Errors:
    """Return the errors of this rank."""
    torch.set_num_threads(1)
    graphs = captured(cases.tensor, size)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    try:
        mesh = init_device_mesh("cpu", (size,))
        return Errors(
            tensor_parallel(cases.tensor, graphs, mesh),
            expert_parallel(cases.expert, mesh),
            context_parallel(cases.context, mesh),
        )
    finally:
        dist.destroy_process_group()
