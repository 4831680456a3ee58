"""A graph captured on the CPU, made to run on another device. None of this has been run on a GPU.

Captures are made on the CPU (:mod:`piper_core.frontend.capture`), where attention is one operation. That operation has
a kernel on the CPU alone: elsewhere the flash kernels of CUDA stand for it, and where they do not serve (float32, a
mask, widths that are no multiple of 8) scores are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph

from piper_core.frontend.ring_attention import written_backward, written_forward

_ATEN = torch.ops.aten
Strides: TypeAlias = Sequence[tuple[int, ...]]
"""How each result lies in memory."""
_FLASH_WIDTH = 256
"""The widest head of CUDA's flash kernels."""


def settle(graph: Graph, device: torch.device) -> None:
    """Let a graph make its tensors on ``device``, and call attention kernels that are there."""
    if device.type == "cpu":
        return
    for node in list(graph.nodes):
        if node.op == "get_attr":  # a constant, which the capture holds
            with graph.inserting_after(node):
                moved = graph.call_method("to", (node, device))
            node.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
        if node.target in _KERNELS:
            node.target = _KERNELS[node.target]
            node.update_kwarg("strides", tuple(each.stride() for each in node.meta["val"]))


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None, strides: Strides,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return output (b, heads, s, width) and log-sum-exp (b, heads, s), as the CPU's kernel does."""
    _no_dropout(dropout)
    if _flash_serves(q, k, v, attn_mask):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        out, lse = written_forward(q, k, v, causal, _scale(q, scale), attn_mask)
    return _laid((out.to(q.dtype), lse), strides)


def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None, strides: Strides,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    _no_dropout(dropout)
    if _flash_serves(q, k, v, attn_mask):
        unused: Any = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state, read by dropout alone
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
        )
    else:
        dq, dk, dv = written_backward(gradient, q, k, v, out, lse, causal, _scale(q, scale), attn_mask)
    return _laid((dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)), strides)


def _flash_serves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    width = q.shape[-1]
    return (
        mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and width == k.shape[-1] == v.shape[-1]
        and width % 8 == 0
        and width <= _FLASH_WIDTH
    )


def _laid(made: Sequence[Tensor], strides: Strides) -> tuple[Tensor, ...]:
    """Return results in memory as they were in the capture (dense): views after it count on that."""
    return tuple(each if each.stride() == s else _in_order(each, s) for each, s in zip(made, strides, strict=True))


def _in_order(made: Tensor, stride: tuple[int, ...]) -> Tensor:
    order = sorted(range(made.dim()), key=lambda dim: -stride[dim])
    back = [order.index(dim) for dim in range(made.dim())]
    return made.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _no_dropout(dropout: float) -> None:
    assert dropout == 0.0, "torch calls the CPU's flash kernel for no dropout alone"


_KERNELS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
