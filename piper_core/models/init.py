"""Initial weights, each from a seed of its own: the same in one process and in many, whatever part is built."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper_core.arch.record import Architecture

STD = 0.02
_OUT = ("o.weight", "down.weight")
"""Projections onto the residual: their deviation shrinks with depth (GPT-2, section 2.3)."""

TIED = "head.projection.weight"
"""What a tied model shares with its embedding."""


def initialise(module: nn.Module, architecture: Architecture, seed: int, prefix: str = "") -> None:
    """Set every parameter of ``module``, whose names in the whole model begin with ``prefix``.

    Parameters on meta or under a fake mode are left alone.
    """
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and not isinstance(parameter.data, FakeTensor):
            whole = prefix + name
            if architecture.tied and whole == TIED:
                whole = "embed.tokens.weight"
            initialise_parameter(parameter.data, whole, architecture, seed)


def initialise_parameter(values: Tensor, name: str, architecture: Architecture, seed: int, first: int = 0) -> None:
    """Set one parameter in place, by its name in the whole model.

    Norms are 1, biases 0, the rest normal, drawn in fp32. Each expert of a stacked weight (experts, out, in) has a
    seed of its own, ``first`` being the expert that ``values`` begins with.
    """
    if name.endswith("bias"):
        values.zero_()
    elif name.endswith("norm.weight"):
        values.fill_(1.0)
    else:
        std = STD / (2 * architecture.layers) ** 0.5 if name.endswith(_OUT) else STD
        slices = {f"{name}[{first + i}]": each for i, each in enumerate(values)} if values.ndim == 3 else {name: values}
        for key, part in slices.items():
            digest = blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()
            numbers = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
            part.copy_(torch.from_numpy(numbers.standard_normal(tuple(part.shape), np.float32)) * std)
