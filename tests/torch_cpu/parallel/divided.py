"""What ranks do to compare a divided model with a whole one: loss and every gradient, eagerly and as chunk graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from piper_core.arch.record import Architecture
from piper_core.frontend.communicator import Communicator, ProcessGroups, communicating
from piper_core.frontend.cut import Cut
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_graphs, rank_module, rank_part, summed
from piper_core.frontend.run import Step
from piper_core.frontend.shares import part_of, share
from piper_core.models import Part, counting, set_loss_weight, update_balance
from piper_core.names import Recompute
from tests.torch_cpu.parallel.models import BATCH, SEQ, batch, built, relative, worst
from tests.torch_cpu.parallel.ranks import on_ranks

Routing = Literal["learned", "tied", "one", "none"]
Mode = tuple[bool, Recompute]
"""BI and BW apart, recompute policy."""
Steps = dict[Mode, Step]
FEW: tuple[Mode, ...] = ((False, Recompute.NONE), (True, Recompute.FULL))
MODES: tuple[Mode, ...] = (*FEW, (True, Recompute.NONE), (False, Recompute.SELECTIVE))
WHOLE = Part(0, 1, embed=True, head=True)
AXES = ("expert", "context", "tensor")
"""Of a rank's number, the last turns fastest."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is divided, and how its tokens are routed.

    ``tied`` gives all copies to the first experts, ``one`` a copy of every token to the last expert of all.
    """

    architecture: Architecture
    degrees: Degrees
    routing: Routing = "none"

    def __str__(self) -> str:
        d = self.degrees
        sizes = {"tp": d.tensor, "ep": d.expert, "cp": d.context}
        parts = [f"{axis}{ranks}" for axis, ranks in sizes.items() if ranks > 1]
        parts += ["sequence"] * d.sequence + [d.method] * (d.context > 1) + [self.routing] * (self.routing != "none")
        return "-".join([self.architecture.name, *parts])

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes where token counts differ."""
        return FEW if self.routing == "none" else MODES

    @property
    def ranks(self) -> int:
        return self.degrees.tensor * self.degrees.expert * self.degrees.context


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of loss and gradients by mode ("eager", or as Step's options), copies by expert that the rank's
    routers gave out, and the error of balance biases."""

    modes: dict[Mode | str, tuple[float, float]]
    counts: list[int]
    bias: float


def compare(cases: tuple[Case, ...], folder: str) -> dict[Case, list[Errors]]:
    """Return each rank's errors of each case. Graphs are captured and compiled here, once for all ranks; needs a fresh
    process."""
    torch.set_num_threads(1)
    made = {(case.architecture, case.degrees): graphs(case) for case in cases}
    steps = [compiled(case, made[case.architecture, case.degrees]) for case in cases]
    found: dict[Case, list[Errors]] = {}
    for size in sorted({case.ranks for case in cases}):
        chosen = [(case, made) for case, made in zip(cases, steps, strict=True) if case.ranks == size]
        answers = on_ranks(_rank, size, f"{folder}/{size}", chosen)
        found |= {case: [each[i] for each in answers] for i, (case, _) in enumerate(chosen)}
    return found


def graphs(case: Case) -> Cut:
    return rank_graphs(case.architecture, case.degrees, WHOLE, micro_batch=BATCH, seq_len=SEQ, dtype=torch.float64)


def compiled(case: Case, made: Cut) -> Steps:
    return {(split, policy): Step(made, split_backward=split, recompute=policy) for split, policy in case.modes}


def places(rank: int, degrees: Degrees) -> dict[str, int]:
    """Return a rank's place in the group of each axis."""
    sizes, found = degrees.by_axis(), {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def _rank(rank: int, chosen: list[tuple[Case, Steps]]) -> list[Errors]:
    torch.set_num_threads(1)
    known: dict[tuple[int, ...], ProcessGroups] = {}
    found = []
    for case, steps in chosen:
        sizes = tuple(case.degrees.by_axis()[axis] for axis in AXES)
        if sizes not in known:
            known[sizes] = groups(rank, case.degrees)
        with communicating(known[sizes]):
            found.append(errors(case, steps, places(rank, case.degrees), known[sizes]))
    return found


def groups(rank: int, degrees: Degrees) -> ProcessGroups:
    """Return this rank's groups; every rank makes all of them, in one order."""
    mine, found = places(rank, degrees), {}
    everyone = [places(other, degrees) for other in range(dist.get_world_size())]
    for axis in AXES:
        rest = [{k: v for k, v in each.items() if k != axis} for each in everyone]
        for fixed in [each for i, each in enumerate(rest) if each not in rest[:i]]:
            group = dist.new_group([i for i, each in enumerate(rest) if each == fixed])
            if fixed == {k: v for k, v in mine.items() if k != axis}:
                found[axis] = group
    return ProcessGroups(found)


def errors(case: Case, steps: Steps, place: dict[str, int], ranks: Communicator) -> Errors:
    """Return this rank's errors: a slice of the batch for each expert rank, which one process runs in turn."""
    degrees, slices = case.degrees, case.degrees.expert
    whole = reference(case)
    set_loss_weight(whole, 1 / slices)
    losses = []
    with counting(whole) as every:
        for other in range(slices):
            loss = whole(*batch(other))
            (loss / slices).backward()
            losses.append(loss.detach())
    module = like(whole, case, place)
    update_balance(whole, every)
    set_loss_weight(module, 1 / slices)
    targets = batch(place["expert"])[1]
    inputs = [rank_part(x, degrees, place) for x in batch(place["expert"])]
    weight = (inputs[1] != -100).sum().double() / (targets != -100).sum()
    expected = parts(whole, module, degrees, place)

    def error(loss: Tensor, gradients: dict[str, Tensor]) -> tuple[float, float]:
        total = ranks.all_reduce(loss.detach() * weight, "sum", "context")
        reduced = reduce(gradients, module, degrees, ranks)
        return relative(total, losses[place["expert"]]), worst(reduced, expected)

    with counting(module) as counts:
        loss = module(*inputs)
    (loss * weight / slices).backward()
    eager = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    modes: dict[Mode | str, tuple[float, float]] = {"eager": error(loss, eager)}
    for mode, step in steps.items():
        (loss,), gradients = step(module, *inputs, tangents=[weight / slices])
        modes[mode] = error(loss, gradients)
    return Errors(modes, counts[0].tolist() if counts else [], _balance(whole, module, counts, degrees, ranks))


def reference(case: Case) -> nn.Module:
    """Return the whole model, whose router does as the case says."""
    model = built(case.architecture)
    with torch.no_grad():
        if case.routing == "tied":
            model.layers[0].moe.router.scores.weight.zero_()
        if case.routing == "one":
            model.layers[0].moe.router.bias[-1] = 10.0
    return model


def like(whole: nn.Module, case: Case, place: dict[str, int]) -> nn.Module:
    """Return a rank's module with its part of another's parameters."""
    module = rank_module(case.architecture, case.degrees, place, WHOLE, dtype=torch.float64)
    at = located(case.degrees, place)
    buffers = dict(whole.named_buffers())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(part_of(whole.get_parameter(name), share(parameter), at))
        for name, buffer in module.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(buffers[name])
    return module


def located(degrees: Degrees, place: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {axis: (place[axis], ranks) for axis, ranks in degrees.by_axis().items()}


def parts(whole: nn.Module, module: nn.Module, degrees: Degrees, place: dict[str, int]) -> dict[str, Tensor]:
    """Return the rank's part of each gradient of the whole model."""
    found, at = {}, located(degrees, place)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        found[name] = part_of(parameter.grad, share(module.get_parameter(name)), at)
    return found


def reduce(gradients: dict[str, Tensor], module: nn.Module, degrees: Degrees, ranks: Communicator) -> dict[str, Tensor]:
    """Return gradients summed over the ranks that hold the same part."""
    of_tensor, found = summed(module, degrees), {}
    for name in sorted(gradients):
        total = gradients[name]
        if name in of_tensor:
            total = ranks.all_reduce(total, "sum", "tensor")
        total = ranks.all_reduce(total, "sum", "context")
        if "expert" not in dict(share(module.get_parameter(name))):
            total = ranks.all_reduce(total, "sum", "expert")
        found[name] = total
    return found


def _balance(
    whole: nn.Module, module: nn.Module, counts: dict[int, Tensor], degrees: Degrees, ranks: Communicator
) -> float:
    """Return the error of balance biases updated from counts of all ranks."""
    axes = ("expert", "context", "tensor") if degrees.sequence else ("expert", "context")
    for layer in counts:
        for axis in axes:
            counts[layer] = ranks.all_reduce(counts[layer], "sum", axis)
    update_balance(module, counts)
    biases = dict(module.named_buffers())
    return max((relative(biases[n], b) for n, b in whole.named_buffers() if n.endswith("router.bias")), default=0.0)
