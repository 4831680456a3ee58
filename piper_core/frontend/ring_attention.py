"""Attention over a sequence that ranks divide, keys and values going round (Liu 2023, arXiv 2310.01889).

Each rank holds two of 2 n parts of the sequence, one from the front and one from the back ("zigzag"), so that under a
causal mask all have the same work. Of n blocks, the rank's own is causal; a block from a lower rank is met by all
queries with its front part, one from a higher rank by the back queries whole. Blocks are joined by their log-sum-exp;
the backward sends gradients of keys and values round with them, and is exact.

Both passes are operators that a trace keeps whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piper_core.frontend.communicator import communicator

Block = tuple[slice, slice, bool]
"""Which queries meet which keys, and whether under a causal mask."""


def block(mine: int, other: int, length: int, causal: bool) -> Block:
    """Return what rank ``mine`` computes with the keys of rank ``other``."""
    every, front, back = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if not causal or mine == other:
        return every, every, causal
    return (every, front, False) if other < mine else (back, every, False)


@torch.library.custom_op("piper_core::ring_flash_attention", mutates_args=())
def ring_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries (b, heads, s / n, d) over the keys of all ranks, and its log-sum-exp."""
    ring = _Ring(axis, ranks)
    high = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=high, device=query.device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=high, device=query.device)
    carried = [key, value]
    for other in ring.sources():
        coming = ring.start(carried) if other != ring.last else None
        rows, columns, causal = block(ring.rank, other, query.shape[2], is_causal)
        k, v = carried
        part, weight = _forward(query[:, :, rows], k[:, :, columns], v[:, :, columns], causal, scale)
        joined = torch.logaddexp(lse[:, :, rows], weight)
        out[:, :, rows] *= (lse[:, :, rows] - joined).exp().unsqueeze(-1)
        out[:, :, rows] += part * (weight - joined).exp().unsqueeze(-1)
        lse[:, :, rows] = joined
        carried = coming() if coming is not None else carried
    return out.to(query.dtype), lse


@torch.library.custom_op("piper_core::ring_flash_attention_backward", mutates_args=())
def ring_flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float, ranks: int, axis: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    ring = _Ring(axis, ranks)
    high = torch.promote_types(query.dtype, torch.float32)
    for_query, for_key, for_value = (each.new_zeros(each.shape, dtype=high) for each in (query, key, value))
    carried = [key, value]
    for other in ring.sources():
        coming = ring.start(carried) if other != ring.last else None
        rows, columns, causal = block(ring.rank, other, query.shape[2], is_causal)
        k, v = carried
        dq, dk, dv = _backward(
            gradient[:, :, rows], query[:, :, rows], k[:, :, columns], v[:, :, columns],
            out[:, :, rows], lse[:, :, rows], causal, scale,
        )  # fmt: skip
        for_query[:, :, rows] += dq
        for_key[:, :, columns] += dk
        for_value[:, :, columns] += dv
        carried = coming() if coming is not None else carried
        for_key, for_value = ring.start([for_key, for_value])()  # at the end they are at home again
    return for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype)


class _Ring:
    """One rank of a ring: what it sends goes to the next, what it receives comes from the last."""

    def __init__(self, axis: str, ranks: int) -> None:
        self.axis, self.ranks = axis, ranks
        self.rank = communicator().rank(axis)
        self.last = (self.rank + 1) % ranks  # whose keys come last: those of the next have come all the way round

    def sources(self) -> list[int]:
        """Return whose keys are here, step by step."""
        return [(self.rank - step) % self.ranks for step in range(self.ranks)]

    def start(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to pass tensors on; the call that is returned gives what came, of the same shapes."""
        if self.ranks == 1:
            return lambda: tensors
        return communicator().pass_on([each.contiguous() for each in tensors], self.axis)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return one block's output and log-sum-exp.

    Relies on the CPU's flash kernel, which takes fewer key heads than query heads; elsewhere scores are written out.
    """
    if q.device.type != "cpu":
        return written_forward(q, k, v, causal, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def written_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same from scores that are written out, on any device; ``mask`` is added to scores."""
    scores, values = _scores(q, k, causal, scale, mask), _spread(v, q)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ values.to(scores.dtype), lse


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's part of the gradients, with output and log-sum-exp of all blocks together."""
    if q.device.type != "cpu":
        return written_backward(gradient, q, k, v, out, lse, causal, scale)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = call(gradient.contiguous(), q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)
    return dq, dk, dv


def written_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the same from scores that are written out."""
    scores = _scores(q, k, causal, scale, mask)
    weights, high = (scores - lse.unsqueeze(-1)).exp(), gradient.to(scores.dtype)
    inner = (high * out).sum(-1, keepdim=True)
    slope = weights * (high @ _spread(v, q).to(scores.dtype).transpose(-1, -2) - inner) * scale
    dk, dv = slope.transpose(-1, -2) @ q.to(scores.dtype), weights.transpose(-1, -2) @ high
    dq = slope @ _spread(k, q).to(scores.dtype)
    return dq, _joined(dk, k), _joined(dv, v)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None = None) -> Tensor:
    high = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(high) @ _spread(k, q).to(high).transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _spread(k: Tensor, q: Tensor) -> Tensor:
    """Return keys repeated for each query head that shares them."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _joined(gradient: Tensor, k: Tensor) -> Tensor:
    """Return the sum over query heads that share a key head."""
    b, _, s, d = gradient.shape
    return gradient.reshape(b, k.shape[1], -1, s, d).sum(2)


@ring_flash_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    high = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=high)


@ring_flash_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _gradients(ctx: Any, gradient: Tensor, _lse: Tensor) -> tuple[Any, ...]:
    query, key, value, out, lse = ctx.saved_tensors
    return *ring_flash_attention_backward(gradient, query, key, value, out, lse, *ctx.rest), None, None, None, None


ring_flash_attention.register_autograd(_gradients, setup_context=_save)
