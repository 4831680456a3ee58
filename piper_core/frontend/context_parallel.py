"""Context parallelism: ranks divide the sequence of every activation, and attention exchanges what it needs.

``ring``: keys and values go round (:mod:`piper_core.frontend.ring_attention`). ``all_to_all``: heads are scattered and
the sequence gathered before attention, and back after it (Jacobs 2023, arXiv 2309.14509). Both keep the sequence in
zigzag order: of 2 n parts rank r holds parts r and 2 n - 1 - r.

torch's own context parallelism has no kernel for the CPU, where all of this is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from piper_core.arch.contract import Method
from piper_core.errors import ConfigError
from piper_core.frontend import exchange
from piper_core.frontend.mixture_plan import share_counts
from piper_core.frontend.ring_attention import ring_flash_attention
from piper_core.frontend.sharding_plan import replace_forward
from piper_core.models.attention import Attention, LatentAttention
from piper_core.models.moe import Router
from piper_core.models.rotary import Rope, Rotary
from piper_core.models.transformer import Embed

AXIS = "context"


def zigzag(x: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Return the rank's part of x along ``dim``."""
    parts = x.chunk(2 * ranks, dim)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), dim)


def unzigzag(x: Tensor, ranks: int, dim: int = 1) -> Tensor:
    """Return the parts of all ranks, one after another along ``dim``, in the order of the sequence."""
    parts = x.chunk(2 * ranks, dim)
    return torch.cat((*parts[0::2], *parts[:0:-2]), dim)


def rezigzag(x: Tensor, ranks: int, dim: int = 1) -> Tensor:
    """Undo :func:`unzigzag`."""
    parts = x.chunk(2 * ranks, dim)
    return torch.cat([part for rank in range(ranks) for part in (parts[rank], parts[2 * ranks - 1 - rank])], dim)


def parallelize_context(model: nn.Module, rank: int, ranks: int, method: Method = "ring") -> nn.Module:
    """Let a model or a part of one take the rank's part (:func:`zigzag`) of tokens and targets, in place; parameters
    stay whole.

    The loss is the mean over the rank's own targets: weigh it by their share of all. The gradient of a parameter is a
    part, to be summed over ranks.
    """
    for module in list(model.modules()):
        match module:
            case Rotary():
                _give_rank(module, rank)
                replace_forward(module, _rotary(module.forward, ranks))
            case Attention() | LatentAttention():
                replace_forward(module, _attention(module.forward, ranks, method))
            case Embed() if module.positions is not None:
                _give_rank(module.positions, rank)
                replace_forward(module.positions, _positions(module.positions.forward, ranks))
            case Router():
                share_counts(module, AXIS, ranks)
            case _:
                pass
    return model


def _give_rank(module: nn.Module, rank: int) -> None:
    """Give a module the rank as a buffer, so that one graph serves every rank."""
    module.register_buffer("context_rank", torch.tensor(rank), persistent=False)


def _places(rank: Tensor, length: int, ranks: int) -> Tensor:
    """Return the positions of the rank's part, ``length`` long."""
    half = torch.arange(length // 2, device=rank.device)
    return torch.cat((half + rank * half.shape[0], half + (2 * ranks - 1 - rank) * half.shape[0]))


def _rotary(inner: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    def forward(self: Any, length: int) -> Rope:
        places = _places(self.context_rank, length, ranks)
        cos, sin = inner(length * ranks)
        return cos.index_select(0, places), sin.index_select(0, places)

    return forward


def _positions(inner: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    def forward(self: Any, positions: Tensor) -> Tensor:
        found: Tensor = inner(_places(self.context_rank, positions.shape[0], ranks))
        return found

    return forward


def _attention(inner: Callable[..., Any], ranks: int, method: Method) -> Callable[..., Any]:
    def forward(_self: nn.Module, x: Tensor, rope: Any = None) -> Tensor:
        with Exchanged(ranks, method):
            y: Tensor = inner(x, rope)
        return y

    return forward


class Exchanged(TorchFunctionMode):
    """Inside, ``scaled_dot_product_attention`` is of the whole sequence, whoever calls it.

    Relies on that function being one that a ``TorchFunctionMode`` sees.
    """

    def __init__(self, ranks: int, method: Method) -> None:
        super().__init__()
        self.ranks, self.method = ranks, method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p:
            raise ConfigError("context parallel attention takes no mask but the causal one, and no dropout")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.method == "ring":
            out: Tensor = ring_flash_attention(query, key, value, is_causal, scale, self.ranks, AXIS)[0]
            return out
        query, key, value = (self.gather(each) for each in (query, key, value))
        return self.scatter(
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return (b, heads / n, s, d) in the order of the sequence for x of (b, heads, s / n, d)."""
        ranks = self.ranks
        b, heads, s, d = x.shape
        apart = x.reshape(b, ranks, heads // ranks, s, d).movedim(1, 0).contiguous()  # by receiver
        came = exchange.all_to_all(apart, AXIS).movedim(0, 2).flatten(2, 3)  # by sender along the sequence
        return unzigzag(came, ranks, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """Undo :meth:`gather`."""
        ranks = self.ranks
        b, heads, s, d = x.shape
        apart = rezigzag(x, ranks, 2).reshape(b, heads, ranks, s // ranks, d).movedim(2, 0).contiguous()
        came: Tensor = exchange.all_to_all(apart, AXIS)
        return came.movedim(0, 1).flatten(1, 2)
