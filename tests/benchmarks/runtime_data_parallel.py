"""Data parallel steps against DDP and FSDP2, two gloo ranks, a thread each, in pairs; memory is in runtime_memory.

Times are compared as in runtime_pipelining (PIPER_BENCH_SHARED=1: nothing is judged).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

HIDDEN, SEQ, LAYERS, VOCAB, MICROBATCHES, RANKS = 256, 128, 8, 512, 4, 2
PAIRS = int(os.environ.get("PIPER_BENCH_PAIRS", "9"))
SHARED = os.environ.get("PIPER_BENCH_SHARED", "") not in ("", "0")
AGAINST = {"ours ZeRO-0": "DDP", "ours ZeRO-2": "FSDP2 kept", "ours ZeRO-3": "FSDP2"}
LIMIT = 1.0


def main() -> int:
    """Print the tables; return 1 when a limit is broken."""
    from tests.torch_cpu.parallel.ranks import on_ranks

    kept = True
    print(f"hidden {HIDDEN}, sequence {SEQ}, {LAYERS} layers, {MICROBATCHES} microbatches of a rank")
    print(f"{'system':16}{'ms':>9}{'against':>14}{'ms':>9}{'ratio':>8}{'CPU':>8}{'limit':>7}")
    source(Shape()).cut  # noqa: B018  # before the forks
    for name, other in AGAINST.items():
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(compare, RANKS, f"{folder}/store", name, other)
        ours, theirs, wall, cpu = (statistics.mean(each) for each in zip(*found, strict=True))
        print(f"{name:16}{1e3 * ours:9.1f}{other:>14}{1e3 * theirs:9.1f}{wall:8.3f}{cpu:8.3f}{LIMIT:7.2f}", flush=True)
        kept &= wall <= LIMIT
    return 0 if kept or SHARED else 1


def compare(rank: int, ours: str, theirs: str) -> tuple[float, float, float, float]:
    """Return the medians of two systems' steps, and of the ratios of wall and of CPU time."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    steps = [make(name, rank, Shape()) for name in (ours, theirs)]
    losses = [step() for step in steps]
    total = torch.tensor([losses[0]], dtype=torch.float64)
    dist.all_reduce(total)
    other = torch.tensor([losses[1]], dtype=torch.float64)
    dist.all_reduce(other)
    assert abs(float(total) - float(other) / dist.get_world_size()) < 1e-4 * abs(float(total)), (total, other)
    times, cpus = [], []
    for pair in range(PAIRS):
        wall, cpu = {}, {}
        for which in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            steps[which]()
            cpu[which] = time.process_time() - start_cpu
            dist.barrier()
            wall[which] = time.perf_counter() - start
        times.append((wall[0], wall[1]))
        cpus.append(cpu[0] / cpu[1])
    return (
        statistics.median(a for a, _ in times), statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times), statistics.median(cpus),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the sequences of a microbatch; ``foreach`` is how FSDP2's AdamW goes about its tensors (torch's
    default is quick and makes copies, False is lean)."""

    sequences: int = 1
    seq_len: int = SEQ
    layers: int = LAYERS
    foreach: bool | None = None

    def architecture(self) -> Any:
        """Return the model."""
        from piper_core.arch.record import Architecture

        return Architecture("bench", self.layers, HIDDEN, 4 * HIDDEN, 8, 8, HIDDEN // 8, VOCAB)


def make(name: str, rank: int, shape: Shape) -> Callable[[], float]:
    """Return a step of a system, which returns the rank's part of the loss (theirs: the mean over its batch)."""
    import torch

    torch.manual_seed(0)
    return (_ours if name.startswith("ours") else _theirs)(name, rank, shape)


@cache
def source(shape: Shape) -> Any:
    """Return the model as our runtime takes it; captured before the forks, it is shared by them."""
    from piper_core.runtime.model import ArchitectureSource

    return ArchitectureSource(shape.architecture(), shape.sequences, shape.seq_len, seed=1)


def _ours(name: str, rank: int, shape: Shape) -> Callable[[], float]:
    import torch

    from piper_core.arch.closed_form import model_chunks
    from piper_core.ir.action import format_slots
    from piper_core.ir.dag import training_dag
    from piper_core.mesh import Mesh
    from piper_core.names import Sync
    from piper_core.program.program import Program
    from piper_core.runtime.gloo import GlooCommunicator
    from piper_core.runtime.lowering import Lowering
    from piper_core.runtime.optimizer import AdamW
    from piper_core.runtime.program import RankProgram, Training
    from piper_core.schedule.compile import compile_program
    from piper_core.schedule.families import get_family

    pp = 2 if "PP2" in name else 1
    dp = 1 if name == "ours PP2 ZeRO-0" else 2
    zero = int(name[-1])
    layer = sum(
        p.numel for c in model_chunks(shape.architecture(), shape.seq_len).chunks if c.layer == 0 for p in c.parameters
    )
    bucket = 25 if zero == 0 else max(1, round(4 * layer / 2**20))
    batch = MICROBATCHES * dp * shape.sequences
    rows = get_family("1f1b").grid(pp, MICROBATCHES, 1).rows
    data: list[dict[str, Any]] = [
        {"op": "stage", "stages": pp},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": MICROBATCHES},
        *({"op": "place", "filter": {"PP": s}, "devices": [*range(s * dp, s * dp + dp)]} for s in range(pp)),
        {"op": "order", "actions": {str(r): format_slots(row) for r, row in enumerate(rows)}},
    ]
    if dp > 1:
        flags = {"shard_grads": zero >= 2, "shard_params": zero == 3}
        item = {"op": "replicate", "filter": {}, "axis": "dp", "bucket_size": bucket}
        data.append(item | {k: v for k, v in flags.items() if v})
    from dataclasses import replace

    model = replace(model_chunks(shape.architecture(), shape.seq_len), dtype_bytes=4)
    mesh = Mesh((("pp", pp), ("dp", dp)))
    compiled = compile_program(Program.parse(data), training_dag(model, global_batch=batch, sync=Sync.NONE), mesh)
    shared = Lowering(compiled, source(shape))
    program = RankProgram(shared, rank, GlooCommunicator(), Training(AdamW(1e-3)))
    tokens, targets = (torch.randint(0, VOCAB, (batch, shape.seq_len)) for _ in range(2))
    return lambda: float(program.step(tokens, targets))


def _theirs(name: str, rank: int, shape: Shape) -> Callable[[], float]:
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from piper_core.models import build_model

    size = dist.get_world_size()
    model: Any = build_model(shape.architecture(), seed=1)
    if name.startswith("DDP"):
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=name != "FSDP2 kept")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    how: dict[str, Any] = {"foreach": shape.foreach} if name.startswith("FSDP2") else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **how)
    batch = MICROBATCHES * size * shape.sequences
    tokens, targets = (torch.randint(0, VOCAB, (batch, shape.seq_len)) for _ in range(2))
    places = [m * size + rank for m in range(MICROBATCHES)]
    parts = [slice(at * shape.sequences, (at + 1) * shape.sequences) for at in places]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for m, part in enumerate(parts):
            last = m == MICROBATCHES - 1
            quiet = model.no_sync() if name.startswith("DDP") and not last else contextlib.nullcontext()
            with quiet:
                loss = model(tokens[part], targets[part]) / MICROBATCHES
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return step
