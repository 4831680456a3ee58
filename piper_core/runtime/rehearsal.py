"""Rehearse a strategy where there are fewer devices than it needs: its small double runs on virtual ranks, in one
process, through the executor that real ranks use, and must compute what one process computes.

Messages and collectives meet as the plan says or not at all: a deadlock, a mispaired message or a wrong gradient shows
here as it would on the cluster. Speed and memory do not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from piper_core.arch.record import Architecture
from piper_core.errors import RunError
from piper_core.models import build_model
from piper_core.names import Sync
from piper_core.program.strategy import Strategy
from piper_core.runtime.communicator import Communicator
from piper_core.runtime.compare import difference
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.local import LocalWorld
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.optimizer import SGD, Clip
from piper_core.runtime.program import RankProgram, Training
from piper_core.runtime.reference import Reference, Result
from piper_core.runtime.rehearsal_proxy import proxy
from piper_core.runtime.slices import Reduction
from piper_core.runtime.state import Held, assemble, held
from piper_core.schedule.compile import compile_program

STEPS = 2
TOLERANCE = 1e-8
"""Of losses, gradients and parameters in float64, relative to the largest value of each tensor."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a rehearsal found; it raises where the double did not compute what it must."""

    of: str
    """What was left of ranks, layers and microbatches."""
    ranks: int
    actions: int
    steps: int
    losses: tuple[float, ...]
    error: float
    """The largest relative difference from one process, in losses, gradients and parameters."""
    seconds: float

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"a rehearsal, not a run at size: {self.of}; {self.actions} actions a step on {self.ranks} virtual ranks "
            f"in one process, {self.steps} steps in {self.seconds:.1f} s; losses, gradients and parameters equal those "
            f"of a plain loop (largest difference {self.error:.0e})"
        )


def rehearse(strategy: Strategy, architecture: Architecture, *, steps: int = STEPS, seed: int = 1) -> Rehearsal:
    """Run a strategy's double for some steps and compare it with one process; ``seed`` is of weights and tokens.

    Raises:
        ConfigError: the strategy cannot be shrunk; PlanError: its double deadlocks or mispairs messages; RunError: it
            computes something else than one process.
    """
    began = perf_counter()
    double = proxy(strategy, architecture)
    compiled = compile_program(double.strategy.program, double.base, double.strategy.header.world)
    header = double.strategy.header
    clip = Clip(1.0) if header.sync is Sync.GLOBAL_NORM else None
    training = Training(SGD(0.1, 0.9), clip, Reduction(header.reduction))
    source = ArchitectureSource(
        double.architecture, 1, double.base.model.seq_len, degrees_of(compiled.dag), torch.float64, seed=seed
    )
    lowering = Lowering(compiled, source)
    batches = _batches(lowering.slicing.batch, double.architecture.vocab, source.seq_len, steps, seed)
    found = LocalWorld(len(lowering.ranks)).run(lambda each: _train(lowering, training, each, batches))
    reference = Reference(build_model(double.architecture, dtype=torch.float64, seed=seed), lowering.slicing, training)
    worst, losses = 0.0, []
    for step, batch in enumerate(batches):
        wanted = reference.step(*batch)
        losses.append(sum(each[step][0] for each in found))
        worst = max(worst, _compare(step, losses[-1], [each[step] for each in found], wanted))
    return Rehearsal(
        double.of, len(lowering.ranks), len(compiled.plan), steps, tuple(losses), worst, perf_counter() - began
    )


Part = tuple[float, list[Held], list[Held]]
"""A step of one rank: its part of the loss, of gradients, of parameters."""


def _train(
    lowering: Lowering, training: Training, communicator: Communicator, batches: list[tuple[Tensor, Tensor]]
) -> list[Part]:
    rank = RankProgram(lowering, communicator.rank, communicator, training)
    communicator.where = rank.where  # type: ignore[attr-defined]  # virtual ranks say it in reports of deadlocks
    found = []
    for batch in batches:
        loss = float(rank.step(*batch))
        found.append((loss, _copies(rank, "gradient"), _copies(rank, "master")))
    return found


def _copies(rank: RankProgram, which: Any) -> list[Held]:
    return [replace(each, values=each.values.clone()) for each in held(rank, which)]


def _batches(size: int, vocabulary: int, length: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, vocabulary, (size, length), generator=generator) for _ in range(2 * steps)]
    return [(draw[2 * i], draw[2 * i + 1]) for i in range(steps)]


def _compare(step: int, loss: float, parts: list[Part], wanted: Result) -> float:
    """Return the largest relative difference of a step.

    Raises:
        RunError: above what rounding explains, with the name of what differs.
    """
    worst = difference(torch.tensor(loss), torch.tensor(wanted.loss))
    where = "the loss"
    for what, index, expected in (("gradient", 1, wanted.gradients), ("parameter", 2, wanted.parameters)):
        made = assemble(part for each in parts for part in each[index])  # type: ignore[union-attr]  # by index
        for name, value in expected.items():
            error = difference(made[name], value)
            if error > worst:
                worst, where = error, f"the {what} of {name}"
    if not worst <= TOLERANCE:
        raise RunError(f"rehearsal: {where} differs from one process's in step {step} by {worst:.1e} of its size")
    return worst
