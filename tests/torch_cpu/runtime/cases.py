"""Strategies on tiny models, run on virtual ranks and in one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.ir.action import format_slots
from piper_core.ir.dag import training_dag
from piper_core.mesh import Mesh
from piper_core.models import build_model
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.local import LocalWorld
from piper_core.runtime.lowering import Lowering, slicing_of
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.program import RankProgram, Training
from piper_core.runtime.reference import Reference, Result
from piper_core.runtime.state import Held, assemble, held
from piper_core.schedule.compile import Compiled, compile_program
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Layout, rows_of_stage

LLAMA = Architecture("llama", 4, 16, 32, 4, 4, 4, 32)
TIED = replace(LLAMA, name="tied", tied=True, norm="layer", gated=False, bias=True, activation="gelu_tanh")
MIXTURE = Architecture("mixture", 4, 16, 0, 4, 4, 4, 32, experts=4, top_k=2, expert_ffn=16, balance_loss=0.1)
BIASED = Architecture("biased", 4, 16, 0, 4, 4, 4, 32, experts=4, top_k=2, expert_ffn=16, shared_ffn=16, balance="bias")
SEQ = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy: pipeline, then ranks of a row as dp x cp x tp with experts inside dp."""

    architecture: Architecture = LLAMA
    schedule: str = "1f1b"
    pp: int = 1
    v: int = 1
    m: int = 2
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    sequence: bool = False
    method: str = "ring"
    recompute: str = "none"
    buckets: bool = True
    prefetch: int = 1
    sync: Sync = Sync.GLOBAL_NORM
    micro_batch: int = 1
    cuts: tuple[int, ...] = ()
    apart: bool = False
    """BI and BW apart in a family that has B whole."""

    def __str__(self) -> str:
        fields = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.architecture.name, *(f"{name}={getattr(self, name)}" for name in fields)])

    @property
    def layout(self) -> Layout:
        return FAMILIES[self.schedule].layout

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def compiled(case: Case) -> Compiled:
    """Compile a case for the closed form of its model."""
    model = model_chunks(case.architecture, SEQ)
    if case.buckets:  # a bucket size is in MiB; with elements as large as this it is 1024 of them
        model = replace(model, dtype_bytes=1024)
    dag = training_dag(model, global_batch=case.m * case.dp * case.micro_batch, sync=case.sync)
    mesh = Mesh((("pp", case.pp), ("edp", case.dp // case.ep), ("ep", case.ep), ("cp", case.cp), ("tp", case.tp)))
    size = case.dp * case.cp * case.tp
    homes = rows_of_stage(case.layout, case.pp, case.v)
    stage = {"cuts": list(case.cuts)} if case.cuts else {"stages": len(homes)}
    data: list[dict[str, Any]] = [
        {"op": "stage", **stage},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": case.m},
    ]
    for s, rows in enumerate(homes):
        for half, row in enumerate(rows):
            part = {} if len(rows) == 1 else {"MB": f"{half * case.m // 2}-{(half + 1) * case.m // 2 - 1}"}
            devices = list(range(row * size, (row + 1) * size))
            data.append({"op": "place", "filter": {"PP": s, **part}, "devices": devices})
    if case.ep > 1:
        data.append({"op": "shard", "filter": {"REGION": "expert"}, "axis": "ep", "kind": "expert", "stream": "ep"})
    if case.cp > 1:
        data.append({"op": "shard", "filter": {}, "axis": "cp", "kind": "context", "method": case.method})
    if case.tp > 1:
        data.append({"op": "shard", "filter": {}, "axis": "tp", "kind": "sequence" if case.sequence else "tensor"})
    if case.dp * case.cp > 1 or case.layout is Layout.BIDIRECTIONAL:
        flags = {"shard_optimizer": case.zero == 1, "shard_grads": case.zero >= 2, "shard_params": case.zero == 3}
        extra = {"bucket_size": 1} if case.buckets else {}
        item = {"op": "replicate", "filter": {}, "axis": "edp+ep", "prefetch": case.prefetch, **extra}
        data.append(item | {k: v for k, v in flags.items() if v})
    if case.recompute != "none":
        data.append({"op": "recompute", "filter": {}, "policy": case.recompute})
    grid = get_family(case.schedule).grid(case.pp, case.m, case.v)
    rows_text = {str(r): format_slots(row) for r, row in enumerate(grid.rows)}
    if case.apart:
        rows_text = {r: _apart(text) for r, text in rows_text.items()}
    data.append({"op": "order", "actions": rows_text})
    return compile_program(Program.parse(data), dag, mesh)


def _apart(text: str) -> str:
    return re.sub(r"(\d+)B(\d+)", r"\1BI\2 \1BW\2", text)


@cache
def source(architecture: Architecture, micro_batch: int, degrees: Any, dtype: torch.dtype) -> ArchitectureSource:
    return ArchitectureSource(architecture, micro_batch, SEQ, degrees, dtype, seed=1)


def batches(case: Case, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return global batches; some targets are left out, unevenly."""
    generator = torch.Generator().manual_seed(7)
    size = case.m * case.dp * case.micro_batch
    found = []
    for _ in range(count):
        tokens, targets = (
            torch.randint(0, case.architecture.vocab, (size, SEQ), generator=generator) for _ in range(2)
        )
        left_out = torch.rand(size, SEQ, generator=generator) < 0.3
        left_out[:, ::3] = False
        found.append((tokens, targets.masked_fill(left_out, -100)))
    return found


@dataclass(frozen=True, slots=True)
class Ran:
    """What virtual ranks made: losses and norms by step; gradients of each step, parameters and biases at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]
    biases: dict[int, Tensor]


Part = tuple[list[float], list[float], list[list[Held]], list[list[Held]], dict[int, Tensor]]
"""What one rank made."""


@cache
def lowering(case: Case, dtype: torch.dtype) -> Lowering:
    program = compiled(case)
    return Lowering(program, source(case.architecture, case.micro_batch, degrees_of(program.dag), dtype))


def train(
    case: Case, training: Training, communicator: Any, steps: int = 2, dtype: torch.dtype = torch.float64,
    see: Callable[[RankProgram], None] | None = None,
) -> Part:  # fmt: skip
    """Train one rank."""
    rank = RankProgram(lowering(case, dtype), communicator.rank, communicator, training)
    communicator.where = rank.where
    losses, norms, gradients, parameters = [], [], [], []
    for batch in batches(case, steps):
        losses.append(float(rank.step(*batch)))
        norms.append(rank.sync.norm)
        gradients.append([_copied(each) for each in held(rank, "gradient")])
        parameters.append([_copied(each) for each in held(rank)])
    if see is not None:
        see(rank)
    return losses, norms, gradients, parameters, dict(rank.balance.biases)


def on_virtual_ranks(
    case: Case, training: Training, dtype: torch.dtype = torch.float64, steps: int = 2,
    see: Callable[[RankProgram], None] | None = None,
) -> Ran:  # fmt: skip
    """Train on virtual ranks."""
    lowering(case, dtype)
    return joined(LocalWorld(case.ranks).run(lambda each: train(case, training, each, steps, dtype, see)), steps)


def joined(found: list[Part], steps: int) -> Ran:
    """Put together what all ranks made."""
    return Ran(
        [sum(each[0][i] for each in found) for i in range(steps)],
        found[0][1],
        [assemble(part for each in found for part in each[2][i]) for i in range(steps)],
        [assemble(part for each in found for part in each[3][i]) for i in range(steps)],
        {layer: bias for each in found for layer, bias in each[4].items()},
    )


def _copied(each: Held) -> Held:
    return replace(each, values=each.values.clone())


def in_one_process(case: Case, training: Training, dtype: torch.dtype = torch.float64, steps: int = 2) -> list[Result]:
    """Train in one process."""
    slicing = slicing_of(compiled(case))
    reference = Reference(build_model(case.architecture, dtype=dtype, seed=1), slicing, training)
    return [reference.step(*batch) for batch in batches(case, steps)]


def check(case: Case, training: Training, dtype: torch.dtype = torch.float64, tolerance: float = 1e-8) -> None:
    """Compare two steps on virtual ranks with one process."""
    compare(case, on_virtual_ranks(case, training, dtype), in_one_process(case, training, dtype), tolerance)


def compare(case: Case, ran: Ran, expected: list[Result], tolerance: float = 1e-8) -> None:
    """Compare losses, norms, gradients, updated parameters and balance biases."""
    for step, wanted in enumerate(expected):
        at = f"{case}: step {step}"
        _near(torch.tensor(ran.losses[step]), torch.tensor(wanted.loss), tolerance, f"{at}, loss")
        if case.sync is not Sync.NONE:
            _near(torch.tensor(ran.norms[step]), torch.tensor(wanted.norm), tolerance, f"{at}, norm")
        for kind, found, all_wanted in (
            ("gradient", ran.gradients[step], wanted.gradients),
            ("parameter", ran.parameters[step], wanted.parameters),
        ):
            assert found.keys() == all_wanted.keys(), f"{at}: {found.keys() ^ all_wanted.keys()}"
            for name, value in all_wanted.items():
                _near(found[name], value, tolerance, f"{at}, {kind} of {name}")
    for layer, bias in ran.biases.items():
        _near(bias, expected[-1].buffers[f"layers.{layer}.moe.router.bias"], tolerance, f"{case}: bias {layer}")


def _near(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    scale = max(float(wanted.abs().max()), 1e-3)
    error = float((found - wanted).abs().max()) / scale
    assert error <= tolerance, f"{what}: relative error {error:.3g} (limit {tolerance:.0e})"
