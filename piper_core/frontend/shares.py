"""Which part of a parameter a rank holds: divided parameters say along which dimension, for which axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor, nn

Share: TypeAlias = tuple[tuple[str, int], ...]
"""(axis, dimension) of each division of a parameter; () for one that is whole."""
_SHARE = "piper_share"


def divide(module: nn.Module, name: str, axis: str, dim: int, rank: int, ranks: int) -> None:
    """Replace a parameter (None: nothing) by its ``rank``-th of ``ranks`` equal parts along ``dim``."""
    whole = getattr(module, name)
    if whole is None:
        return
    part = nn.Parameter(whole.detach().chunk(ranks, dim)[rank].clone())
    setattr(part, _SHARE, (*share(whole), (axis, dim)))
    setattr(module, name, part)


def share(parameter: Tensor) -> Share:
    """Return how a parameter is divided."""
    found: Share = getattr(parameter, _SHARE, ())
    return found


def shares(module: nn.Module) -> dict[str, Share]:
    """Return how every parameter of a module is divided, by name."""
    return {name: share(parameter) for name, parameter in module.named_parameters()}


def is_divided(parameter: Tensor, axis: str) -> bool:
    """Say whether a parameter is divided over the ranks of ``axis``."""
    return any(axis == each for each, _ in share(parameter))


def part_of(whole: Tensor, how: Share, places: Mapping[str, tuple[int, int]]) -> Tensor:
    """Return the part of a whole tensor that belongs to the rank at ``places`` (axis -> rank, ranks)."""
    for axis, dim in how:
        rank, ranks = places[axis]
        whole = whole.chunk(ranks, dim)[rank]
    return whole
