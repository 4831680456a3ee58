"""One rank of torch's own pipeline runtime: it runs schedules from CSV files and compares gradients with autograd.

``python -m tests.torch_cpu.export.pipeline_rank RANK RANKS STORE CASES`` prints, as JSON, the largest relative error of
each case. A case is {file, layers, rows_of, microbatches}; layers are linear, with tanh.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, SEQUENCES = 6, 2


def model(layers: int) -> nn.ModuleList:
    torch.manual_seed(layers)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def error(case: dict[str, Any], rank: int) -> float:
    """Return the largest relative error of the gradients of this rank's stages."""
    layers, rows_of, m = case["layers"], case["rows_of"], case["microbatches"]
    whole, split = model(sum(layers)), model(sum(layers))
    data = torch.randn(m * SEQUENCES, WIDTH, dtype=torch.float64)
    target = torch.randn(m * SEQUENCES, WIDTH, dtype=torch.float64)
    loss_of(nn.Sequential(*whole)(data), target).backward()
    first = [sum(layers[:stage]) for stage in range(len(layers))]
    mine = [stage for stage, rows in enumerate(rows_of) if rank in rows]
    stages = [
        PipelineStage(nn.Sequential(*split[first[s] : first[s] + layers[s]]), s, len(layers), torch.device("cpu"))
        for s in mine
    ]
    runtime = _PipelineScheduleRuntime(stages, m, loss_fn=loss_of)
    runtime._load_csv(case["file"])
    runtime.step(*([data] if 0 in mine else []), target=target if len(layers) - 1 in mine else None)
    worst = 0.0
    for stage in mine:
        for layer in range(first[stage], first[stage] + layers[stage]):
            for ours, theirs in zip(split[layer].parameters(), whole[layer].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                worst = max(worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return worst


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[3], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    print(json.dumps([error(case, rank) for case in json.loads(Path(sys.argv[4]).read_text())]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
