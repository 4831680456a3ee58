"""Peak memory of a rank, and the largest microbatch under one cap: ours against DDP, FSDP2 and a pipeline with FSDP2.

Four gloo ranks on one machine, AdamW, float32, four microbatches of a data rank. Memory is what torch's CPU allocator
has handed out on the fullest rank in the second step, at most, as torch's profiler records every allocation: weights,
gradients, optimizer states, activations, messages, buffers; not the libraries, nor what gloo holds outside torch.

The cap is PIPER_BENCH_CAPS (1 and 1.5 unless set) times what a pipeline with FSDP2 takes for microbatches of one
sequence, as TorchTitan composes the two: weights stay gathered between microbatches, gradients whole until the last.
The largest microbatch is read off a line through two measured sizes, then measured: it fits.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from tests.benchmarks.runtime_data_parallel import HIDDEN, MICROBATCHES, VOCAB, Shape, make, source

SEQ, LAYERS = 32, 16
TORCH_PIPELINE = "torch PP2 FSDP2"
SYSTEMS = ("ours PP2 DP2 ZeRO-2", "ours PP2 DP2 ZeRO-3", TORCH_PIPELINE, "FSDP2 DP4", "DDP DP4")
TWO_RANKS = ("ours ZeRO-0", "DDP", "ours ZeRO-2", "FSDP2 kept", "ours ZeRO-3", "FSDP2")
CAPS = tuple(map(float, os.environ.get("PIPER_BENCH_CAPS", "1,1.5").split(",")))
SIZES = (1, 4)


def main() -> int:
    """Print the tables; return 1 when a pipeline of ours fits less than torch's."""
    print(f"hidden {HIDDEN}, sequence {SEQ}, {LAYERS} layers, {MICROBATCHES} microbatches of a data rank\n")
    print(f"{'two ranks':24}{'peak MiB a rank':>17}")
    for name in TWO_RANKS:
        print(f"{name:24}{peak(name, 1) / 2**20:17.1f}", flush=True)
    caps = [factor * peak(TORCH_PIPELINE, 1) for factor in CAPS]
    head = "".join(f"{f'fits {cap / 2**20:.0f} MiB':>14}" for cap in caps)
    print(f"\n{'four ranks':24}{'MiB, 1 sequence':>17}{'each more':>11}{head}")
    fits = {}
    for name in SYSTEMS:
        fits[name] = [largest(name, cap) for cap in caps]
        first, last = (peak(name, size) / 2**20 for size in SIZES)
        shown = "".join(f"{each:14}" for each in fits[name])
        print(f"{name:24}{first:17.1f}{(last - first) / (SIZES[1] - SIZES[0]):11.1f}{shown}", flush=True)
    for name in SYSTEMS[:2]:
        ratios = (f"{a / b:.1f}" if b else "-" for a, b in zip(fits[name], fits[TORCH_PIPELINE], strict=True))
        print(f"{name}: {', '.join(ratios)} times the microbatch of {TORCH_PIPELINE}")
    ours = min(fits[name][i] / max(1, fits[TORCH_PIPELINE][i]) for name in SYSTEMS[:2] for i in range(len(caps)))
    return 0 if ours >= 1 else 1


def largest(name: str, cap: float) -> int:
    """Return the most sequences of a microbatch that fit, 0 for none."""
    low, high = (peak(name, size) for size in SIZES)
    found = max(0, int(SIZES[0] + (cap - low) * (SIZES[1] - SIZES[0]) / (high - low)))
    while found and peak(name, found) > cap:
        found -= 1
    return found


@cache
def peak(name: str, sequences: int) -> float:
    """Return the most bytes of tensors on a rank of a system in its second step."""
    from tests.torch_cpu.parallel import ranks

    ranks.LIMIT_S = 600.0
    shape = Shape(sequences, SEQ, LAYERS, foreach=False)
    if name.startswith("ours"):
        source(shape).cut  # noqa: B018  # before the forks
    with tempfile.TemporaryDirectory() as folder:
        return float(max(ranks.on_ranks(_peak, 2 if name in TWO_RANKS else 4, f"{folder}/store", name, shape)))


def _peak(rank: int, name: str, shape: Shape) -> float:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = _torch_pipeline(rank, shape) if name == TORCH_PIPELINE else make(name, rank, shape)
        made()
        gc.collect()  # what only cycles hold is nobody's need
        since = time.time_ns()
        made()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    now = most = 0
    for at, change in changes:
        now += change
        most = max(most, now) if at >= since else now
    return float(most)


def _torch_pipeline(rank: int, shape: Shape) -> Callable[[], float]:
    """Return a step of torch's 1F1B over two stages, each under FSDP2 on two ranks."""
    import torch
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from piper_core.models.stage import Part, build_stage

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    half = LAYERS // 2
    part = Part(index * half, (index + 1) * half, embed=index == 0, head=index == 1)
    module: Any = build_stage(shape.architecture(), part, seed=1)
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    stage = pipelining.PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss(logits: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    runs = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, foreach=shape.foreach)
    tokens, targets = (torch.randint(0, VOCAB, (MICROBATCHES * shape.sequences, shape.seq_len)) for _ in range(2))

    def step() -> float:
        losses: list[Any] = []
        optimizer.zero_grad()
        last: dict[str, Any] = {"target": targets, "losses": losses} if index else {}
        runs.step(*([tokens] if index == 0 else []), **last)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step
