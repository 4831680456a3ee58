"""A script that runs an exported schedule on torch's own pipeline runtime, and compares gradients with autograd's."""

from __future__ import annotations

from search.export.job import Job

FILE = "run_schedule.py"


def script(job: Job, schedule: str) -> str:
    """Return the script; each stage lies on one row, and a pipeline rank is one process."""
    return _TEMPLATE.format(
        schedule=schedule, pp=job.pp, layers=list(job.layers), ranks=[rows[0] for rows in job.rows_of],
        microbatches=job.microbatches,
    )  # fmt: skip


_TEMPLATE = '''"""Run {schedule} with torch's own pipeline runtime, on a small model cut as the strategy cuts.

    torchrun --standalone --nproc-per-node {pp} run_schedule.py

Each rank compares the gradients of its stages with those of autograd on the whole model, and prints the largest error.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

LAYERS = {layers}  # of each stage
RANKS = {ranks}  # that hold each stage
MICROBATCHES = {microbatches}
WIDTH, SEQUENCES = 8, 2


def model():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(sum(LAYERS))]


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def main():
    dist.init_process_group("gloo")
    rank, whole, split = dist.get_rank(), model(), model()
    if dist.get_world_size() != {pp}:
        raise SystemExit("this schedule needs {pp} ranks: torchrun --standalone --nproc-per-node {pp} run_schedule.py")
    data = torch.randn(MICROBATCHES * SEQUENCES, WIDTH, dtype=torch.float64)
    target = torch.randn(MICROBATCHES * SEQUENCES, WIDTH, dtype=torch.float64)
    loss_of(nn.Sequential(*whole)(data), target).backward()

    first = [sum(LAYERS[:stage]) for stage in range(len(LAYERS))]
    mine = [stage for stage, holder in enumerate(RANKS) if holder == rank]
    stages = [
        PipelineStage(nn.Sequential(*split[first[s] : first[s] + LAYERS[s]]), s, len(LAYERS), torch.device("cpu"))
        for s in mine
    ]
    runtime = _PipelineScheduleRuntime(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    runtime._load_csv(str(Path(__file__).with_name("{schedule}")))
    runtime.step(*([data] if 0 in mine else []), target=target if len(LAYERS) - 1 in mine else None)

    layers = [layer for s in mine for layer in range(first[s], first[s] + LAYERS[s])]
    pairs = [pair for layer in layers for pair in zip(split[layer].parameters(), whole[layer].parameters())]
    worst = max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)
    sys.stdout.write(f"rank {{rank}}: stages {{mine}}, largest error of a gradient {{worst:.1e}}\\n")  # in one piece
    sys.stdout.flush()
    dist.destroy_process_group()
    if worst > 1e-12:
        raise SystemExit("the gradients are wrong")


if __name__ == "__main__":
    main()
'''
