"""From an architecture record to modules, whole or in parts."""

from __future__ import annotations

import torch

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.models.init import initialise
from piper_core.models.moe import Routing
from piper_core.models.transformer import Block, Embed, Head, Transformer


def build_model(
    architecture: Architecture,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    seed: int | None = None,
    routing: Routing = "dropless",
) -> Transformer:
    """Return the model, or its embedding, first ``layers`` blocks and head.

    A weight depends on ``seed`` (default 0) and its own name alone, not on ``layers``, device or dtype but for
    rounding. On "meta", and under a fake mode, nothing is set.

    Raises:
        ConfigError: more layers than there are.
    """
    count = architecture.layers if layers is None else layers
    if not 1 <= count <= architecture.layers:
        raise ConfigError(f"model {architecture.name!r} has 1 to {architecture.layers} layers, found {count}")
    model = Transformer(architecture, count, routing, torch.device(device), dtype)
    initialise(model, architecture, seed or 0)
    return model


def build_block(
    architecture: Architecture,
    index: int,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    routing: Routing = "dropless",
) -> Block:
    """Return layer ``index`` alone, with the weights that it has in the whole model.

    Raises:
        ConfigError: no such layer.
    """
    if not 0 <= index < architecture.layers:
        raise ConfigError(f"model {architecture.name!r} has layers 0 to {architecture.layers - 1}, found {index}")
    block = Block(architecture, index, routing, torch.device(device), dtype)
    initialise(block, architecture, seed or 0, f"layers.{index}.")
    return block


def build_embed(
    architecture: Architecture,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> Embed:
    """Return the embedding alone."""
    embed = Embed(architecture, torch.device(device), dtype)
    initialise(embed, architecture, seed or 0, "embed.")
    return embed


def build_head(
    architecture: Architecture,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> Head:
    """Return final norm and projection alone; where tied, the projection has the embedding's values."""
    head = Head(architecture, torch.device(device), dtype)
    initialise(head, architecture, seed or 0, "head.")
    return head
