"""Expert parallelism: each rank holds an equal part of the experts, and copies of tokens go to where their expert is.

Nothing is dropped: ranks first exchange how many copies they have for each expert, then the copies themselves, as many
as there are, none included. Rows come sorted by expert, hence by rank; what arrives is sorted by rank and then by
expert, and is brought into the order of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from piper_core.arch.contract import check_degree
from piper_core.arch.record import Architecture
from piper_core.models.grouped import GroupedLinear
from piper_core.models.moe import Experts
from piper_core.names import ShardKind

Group: TypeAlias = dist.ProcessGroup
Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Route:
    """How rows went: how many to and from each rank, and in which row of the arrived ones each sorted row lies."""

    sent: list[int]
    arrived: list[int]
    order: Tensor
    group: Group


def check_experts(architecture: Architecture, degree: int, seq_len: int) -> None:
    """Reject a degree that does not divide the experts.

    Raises:
        ConfigError: with the degrees that would do.
    """
    check_degree(architecture, ShardKind.EXPERT, degree, seq_len)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """Return how many rows each rank has for each of this rank's experts, (ranks, experts here)."""
    given: Tensor = functional.all_to_all_single_autograd(counts, None, None, group)
    return given.view(group.size(), -1)


def fair_counts(rows: int, counts: Tensor, group: Group) -> Tensor:
    """Return what :func:`exchange_counts` does where every expert has its fair share: no value is looked at, so that
    it can be traced."""
    ranks, experts = group.size(), len(counts)
    return torch.full((ranks, experts // ranks), rows // experts, device=counts.device)


def dispatch(rows: Tensor, counts: Tensor, group: Group, *, fair: bool = False) -> tuple[Tensor, Tensor, Route]:
    """Send rows (n, hidden), sorted by expert, to the ranks of their experts.

    Returns the rows that arrived sorted by expert, how many each expert here has, and the way back.
    """
    ranks = group.size()
    if fair:
        given = fair_counts(len(rows), counts, group)
        sent = arrived = [len(rows) // ranks] * ranks
    else:
        given = exchange_counts(counts, group)
        sent, arrived = counts.view(ranks, -1).sum(1).tolist(), given.sum(1).tolist()
    came = functional.all_to_all_single_autograd(rows, arrived, sent, group)
    experts = torch.arange(given.shape[1], device=rows.device).repeat(ranks)
    order = experts.repeat_interleave(given.flatten(), output_size=sum(arrived)).sort(stable=True).indices
    return came.index_select(0, order), given.sum(0), Route(sent, arrived, order, group)


def collect(y: Tensor, route: Route) -> Tensor:
    """Send what the experts made of the rows of a :func:`dispatch` back, in the order that they were in."""
    places = torch.empty_like(route.order).scatter(0, route.order, torch.arange(len(y), device=y.device))
    return functional.all_to_all_single_autograd(y.index_select(0, places), route.sent, route.arrived, route.group)


def parallelize_experts(model: nn.Module, group: Group, *, fair: bool = False) -> nn.Module:
    """Leave this rank its part of each mixture's experts, in place; routers and shared experts stay whole.

    ``fair`` takes every expert to have its fair share, as under "balanced" routing: for traces.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            for child in module.children():
                if isinstance(child, GroupedLinear):
                    _keep_part(child, group)
            module.compute = partial(_compute, module.compute, group, fair)  # type: ignore[method-assign]  # its purpose
    return model


def _compute(inner: Compute, group: Group, fair: bool, rows: Tensor, counts: Tensor) -> Tensor:
    arrived, here, route = dispatch(rows, counts, group, fair=fair)
    return collect(inner(arrived, here), route)


def _keep_part(linear: GroupedLinear, group: Group) -> None:
    for name, parameter in list(linear.named_parameters()):
        part = parameter.detach().chunk(group.size(), 0)[group.rank()]
        setattr(linear, name, nn.Parameter(part.clone()))


def is_divided(name: str) -> bool:
    """Say whether a parameter of that name belongs to single experts, and is thus divided."""
    return ".experts." in f".{name}" and ".shared." not in name


def sum_counts(counts: Mapping[int, Tensor], group: Group) -> dict[int, Tensor]:
    """Return counts of copies by layer summed over ranks: what balance biases are updated from."""
    total = torch.stack([counts[layer] for layer in sorted(counts)])
    dist.all_reduce(total, group=group)
    return dict(zip(sorted(counts), total, strict=True))
