"""Part of a model, as one pipeline stage has it: embedding, a run of layers, head, each where it falls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.models.build import build_block, build_embed, build_head
from piper_core.models.moe import Routing
from piper_core.models.rotary import Rotary
from piper_core.models.transformer import tie


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``first`` to ``last`` (exclusive) of a model, with embedding and head or without."""

    first: int
    last: int
    embed: bool = False
    head: bool = False

    @staticmethod
    def whole(architecture: Architecture) -> Part:
        return Part(0, architecture.layers, embed=True, head=True)


class Stage(nn.Module):
    """Part of a model under the names that everything has in the whole: ``layers`` is by index.

    ``stretch`` is how many times longer the sequence is inside attention than where it enters (sequence parallelism).
    """

    def __init__(self, architecture: Architecture, part: Part, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture, self.part, self.stretch = architecture, part, 1
        self.embed: nn.Module | None = None
        self.head: nn.Module | None = None
        rotates = part.first < part.last and not architecture.learned_positions
        self.rotary = Rotary(architecture, device, dtype) if rotates else None
        self.layers = nn.ModuleDict()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return hidden states (b, s, hidden), or with a head the mean cross-entropy over ``targets``, for tokens
        (b, s), or without an embedding hidden states."""
        length = x.shape[1]
        if self.embed is not None:
            x = self.embed(x)
        else:
            length *= self.stretch
        rope = None if self.rotary is None else self.rotary(length)
        for layer in self.layers.values():
            x = layer(x, rope)
        return x if self.head is None else self.head(x, targets)

    def places(self) -> dict[nn.Module, int]:
        """Return the layers and their indices in the whole model."""
        return {layer: int(index) for index, layer in self.layers.items()}


def build_stage(
    architecture: Architecture,
    part: Part | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    routing: Routing = "dropless",
    divide: Callable[[nn.Module], object] = lambda module: None,
) -> Stage:
    """Return a part of a model (default: all of it), with the weights that it has in the whole model.

    ``divide`` is called with embedding, each block and head as soon as it is built, so that a rank never holds more
    than one of them undivided.

    Raises:
        ConfigError: layers that the model does not have, or nothing at all.
    """
    part = part or Part.whole(architecture)
    nothing = part.first == part.last and not (part.embed or part.head)
    if not 0 <= part.first <= part.last <= architecture.layers or nothing:
        raise ConfigError(
            f"model {architecture.name!r} has layers 0 to {architecture.layers - 1}; a stage is at least one, or an "
            f"embedding or a head, found layers {part.first} to {part.last - 1}"
        )
    made = Stage(architecture, part, torch.device(device), dtype)
    if part.embed:
        made.embed = build_embed(architecture, device=device, dtype=dtype, seed=seed)
        divide(made.embed)
    for index in range(part.first, part.last):
        block = build_block(architecture, index, device=device, dtype=dtype, seed=seed, routing=routing)
        divide(block)
        made.layers[str(index)] = block
    if part.head:
        made.head = build_head(architecture, device=device, dtype=dtype, seed=seed)
        divide(made.head)
    tie(made)
    return made
