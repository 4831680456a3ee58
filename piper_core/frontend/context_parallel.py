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
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from piper_core.arch.contract import Method
from piper_core.errors import ConfigError
from piper_core.frontend.mixture_plan import Routes
from piper_core.frontend.ring_attention import ring_flash_attention
from piper_core.frontend.sharding_plan import TensorGroup, replace_forward
from piper_core.models.attention import Attention, LatentAttention
from piper_core.models.moe import Router
from piper_core.models.transformer import Embed, Transformer


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


def parallelize_context(model: Transformer, mesh: DeviceMesh, method: Method = "ring") -> Transformer:
    """Let a model take the rank's part (:func:`zigzag`) of tokens and targets, in place; parameters stay whole.

    The loss is the mean over the rank's own targets: weigh it by their share of all. The gradient of a parameter is a
    part, to be summed over ranks.

    Raises:
        ConfigError: the ranks do not divide the key heads, where ``method`` needs it.
    """
    ranks, kv_heads = mesh.size(), model.architecture.kv_heads
    if method == "all_to_all" and kv_heads % ranks:
        raise ConfigError(
            f"model {model.architecture.name!r}: {kv_heads} key heads cannot be scattered over {ranks} ranks; use ring"
        )
    model.register_buffer("context_rank", torch.tensor(mesh.get_local_rank()), persistent=False)
    if model.rotary is not None:
        replace_forward(model.rotary, _rotary(model.rotary.forward, model, ranks))
    for module in model.modules():
        match module:
            case Attention() | LatentAttention():
                replace_forward(module, _attention(module.forward, mesh, method))
            case Embed() if module.positions is not None:
                replace_forward(module.positions, _positions(module.positions.forward, model, ranks))
            case Router():
                Routes(TensorGroup(mesh, sequence=True)).apply(module)
            case _:
                pass
    return model


def _places(model: nn.Module, length: int, ranks: int) -> Tensor:
    """Return the positions of the rank's part, ``length`` long."""
    rank = model.context_rank
    assert isinstance(rank, Tensor)
    half = torch.arange(length // 2, device=rank.device)
    return torch.cat((half + rank * half.shape[0], half + (2 * ranks - 1 - rank) * half.shape[0]))


def _rotary(inner: Callable[..., Any], model: nn.Module, ranks: int) -> Callable[..., Any]:
    def forward(_self: nn.Module, length: int) -> tuple[Tensor, Tensor]:
        places = _places(model, length, ranks)
        cos, sin = inner(length * ranks)
        return cos.index_select(0, places), sin.index_select(0, places)

    return forward


def _positions(inner: Callable[..., Any], model: nn.Module, ranks: int) -> Callable[..., Any]:
    def forward(_self: nn.Module, positions: Tensor) -> Tensor:
        found: Tensor = inner(_places(model, positions.shape[0], ranks))
        return found

    return forward


def _attention(inner: Callable[..., Any], mesh: DeviceMesh, method: Method) -> Callable[..., Any]:
    def forward(_self: nn.Module, x: Tensor, rope: Any = None) -> Tensor:
        with Exchanged(mesh, method):
            y: Tensor = inner(x, rope)
        return y

    return forward


class Exchanged(TorchFunctionMode):
    """Inside, ``scaled_dot_product_attention`` is of the whole sequence, whoever calls it.

    Relies on that function being one that a ``TorchFunctionMode`` sees.
    """

    def __init__(self, mesh: DeviceMesh, method: Method) -> None:
        super().__init__()
        self.mesh, self.method = mesh, method

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
        ranks = self.mesh.size()
        if self.method == "ring":
            name = self.mesh.get_group().group_name
            out: Tensor = ring_flash_attention(query, key, value, is_causal, scale, ranks, name)[0]
            return out
        query, key, value = (self.gather(each) for each in (query, key, value))
        return self.scatter(
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return (b, heads / n, s, d) in the order of the sequence for x of (b, heads, s / n, d)."""
        ranks = self.mesh.size()
        b, heads, s, d = x.shape
        apart = x.reshape(b, ranks, heads // ranks, s, d).movedim(1, 0).contiguous()  # by receiver
        came = self.exchange(apart).movedim(0, 2).flatten(2, 3)  # by sender along the sequence
        return unzigzag(came, ranks, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """Undo :meth:`gather`."""
        ranks = self.mesh.size()
        b, heads, s, d = x.shape
        apart = rezigzag(x, ranks, 2).reshape(b, heads, ranks, s // ranks, d).movedim(2, 0).contiguous()
        return self.exchange(apart).movedim(0, 1).flatten(1, 2)

    def exchange(self, x: Tensor) -> Tensor:
        """Return what each rank has for this one, of x (ranks, ...)."""
        ranks, flat = self.mesh.size(), x.flatten(0, 1)
        even = [flat.shape[0] // ranks] * ranks
        return collectives.all_to_all_single_autograd(flat, even, even, self.mesh.get_group()).view_as(x)
