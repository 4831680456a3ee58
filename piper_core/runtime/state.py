"""What ranks hold of each parameter, and whole tensors put together from it: for checkpoints, exports and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from piper_core.frontend.shares import Share
from piper_core.runtime.program import RankProgram

Which = Literal["master", "gradient"]


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter on one rank: of the part of shape ``shape`` that ``share`` and ``places`` (axis ->
    rank, ranks) give its group, those from ``start`` on; ``values`` is flat."""

    name: str
    stage: int
    shape: tuple[int, ...]
    share: Share
    places: dict[str, tuple[int, int]]
    start: int
    values: Tensor


def held(program: RankProgram, which: Which = "master") -> Iterator[Held]:
    """Yield what a rank holds after a step: the weights that the optimizer updates, or their gradients (clipped)."""
    degrees = program.lowering.degrees.by_axis()
    places = {axis: (program.place[axis], degrees[axis]) for axis in degrees}
    for stage, storage in program.sync.stages.items():
        for run in storage.runs:
            shapes = {slot.name: slot.shape for slot in run.slots}
            for name, (start, values) in run.pieces(getattr(run, which)).items():
                yield Held(name, stage, shapes[name], storage.shares[name], places, start, values)


def assemble(parts: Iterable[Held]) -> dict[str, Tensor]:
    """Return whole tensors by name from what all ranks hold; where several hold the same, the last counts."""
    local: dict[tuple[str, tuple[tuple[str, int], ...]], Tensor] = {}
    about: dict[str, Held] = {}
    for part in parts:
        about[part.name] = part
        key = (part.name, tuple((axis, part.places[axis][0]) for axis, _ in part.share))
        if key not in local:
            local[key] = torch.full(part.shape, float("nan"), dtype=part.values.dtype)
        local[key].view(-1)[part.start : part.start + part.values.numel()] = part.values.cpu()
    return {name: _joined(local, name, part.share, part.places, ()) for name, part in about.items()}


def _joined(
    local: dict[tuple[str, tuple[tuple[str, int], ...]], Tensor], name: str, share: Share,
    places: dict[str, tuple[int, int]], chosen: tuple[tuple[str, int], ...],
) -> Tensor:  # fmt: skip
    """Join the parts of a parameter, the first division outermost."""
    if len(chosen) == len(share):
        return local[name, chosen]
    axis, dim = share[len(chosen)]
    parts = [_joined(local, name, share, places, (*chosen, (axis, place))) for place in range(places[axis][1])]
    return torch.cat(parts, dim)
