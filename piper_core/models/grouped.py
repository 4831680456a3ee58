"""Products of each expert with its own rows, whatever their number, as operators that a trace keeps whole.

Rows are sorted by expert and ``counts`` says how many each has, so shapes never depend on the routing. On CUDA in
bf16 it is ``torch._grouped_mm``, elsewhere a product for each expert that has rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

_OPERATORS = torch.ops.piper_core


class GroupedLinear(nn.Module):
    """One linear layer for each of ``experts``: weight (experts, out, in)."""

    def __init__(
        self, experts: int, inner: int, out: int, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, inner, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return (rows, out) for x of (rows, in) sorted by expert, ``counts`` rows for each."""
        y: Tensor = grouped_linear(x, self.weight, counts)
        return y if self.bias is None else grouped_bias(y, self.bias, counts)


@torch.library.custom_op("piper_core::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return x weight^T, (rows, out), with the weight (experts, out, in) of the expert of each row."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        offsets = counts.cumsum(0, dtype=torch.int32)
        product: Tensor = torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=offsets)
        return product
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in _rows(counts):
        torch.mm(x[rows], weight[expert].T, out=out[rows])
    return out


@torch.library.custom_op("piper_core::grouped_outer", mutates_args=())
def grouped_outer(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Return gradient^T x for each expert's rows, (experts, out, in); zero where there are none."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        offsets = counts.cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(gradient.contiguous().T, x.contiguous(), offs=offsets)
    out = x.new_zeros(len(counts), gradient.shape[1], x.shape[1])
    for expert, rows in _rows(counts):
        torch.mm(gradient[rows].T, x[rows], out=out[expert])
    return out


@torch.library.custom_op("piper_core::grouped_bias", mutates_args=())
def grouped_bias(x: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Return x (rows, out) and to each row the bias (experts, out) of its expert."""
    return x + bias.repeat_interleave(counts, 0, output_size=len(x))


@torch.library.custom_op("piper_core::grouped_sum", mutates_args=())
def grouped_sum(x: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each expert's rows, (experts, out) of x (rows, out); zero where there are none."""
    out = x.new_zeros(len(counts), x.shape[1])
    for expert, rows in _rows(counts):
        torch.sum(x[rows], 0, out=out[expert])
    return out


def _rows(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(gradient: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], gradient.shape[1], x.shape[1])


@grouped_bias.register_fake
def _(x: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@grouped_sum.register_fake
def _(x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    for_x, for_weight, _ = ctx.needs_input_grad
    dx = grouped_linear(gradient, weight.transpose(1, 2), counts) if for_x else None
    return dx, grouped_outer(gradient, x, counts) if for_weight else None, None


grouped_linear.register_autograd(_backward, setup_context=_save)


def _save_counts(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _bias_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient, grouped_sum(gradient, *ctx.saved_tensors), None


grouped_bias.register_autograd(_bias_backward, setup_context=_save_counts)


@register_flop_formula(_OPERATORS.grouped_linear)
def _linear_flops(x: Any, weight: Any, counts: Any, **_: Any) -> int:
    return int(2 * x[0] * x[1] * weight[1])


@register_flop_formula(_OPERATORS.grouped_outer)
def _outer_flops(gradient: Any, x: Any, counts: Any, **_: Any) -> int:
    return int(2 * x[0] * x[1] * gradient[1])
