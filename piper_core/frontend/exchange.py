"""Collectives as operators that a trace keeps whole, with their gradients; each is one call of the communicator.

Sizes that depend on routing hide inside: a trace sees what a fair share would be, a run what there is. So no other call
of a graph has such a size written into it, and one graph runs with any counts, zero included.

=================  ===================================================  ======================
operator           returns                                              gradient
=================  ===================================================  ======================
all_reduce         the sum (or maximum) of all ranks' x                 as it is
enter              x, which every rank has                              all_reduce
all_gather         all ranks' x along a dimension                       reduce_scatter
reduce_scatter     the rank's part of the sum along a dimension         all_gather
all_to_all         of x, in a part for each rank, what each has for us  all_to_all
dispatch           rows at the ranks of their experts, by expert        collect
collect            rows back in the order they were in                  dispatch
gather_rows        rows of all ranks, by expert                         scatter_rows
scatter_rows       the rank's rows of the sum over ranks                gather_rows
=================  ===================================================  ======================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper_core.frontend.communicator import Operation, communicator

# --- equal parts ---


@torch.library.custom_op("piper_core::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, operation: str, axis: str) -> Tensor:
    return communicator().all_reduce(x.contiguous(), "max" if operation == "max" else "sum", axis)


@_all_reduce.register_fake
def _(x: Tensor, operation: str, axis: str) -> Tensor:
    return x.new_empty(x.shape)


def _same(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


_all_reduce.register_autograd(_same)


def all_reduce(x: Tensor, axis: str, operation: Operation = "sum") -> Tensor:
    """Return the sum or maximum of all ranks' x; its gradient is what every rank is given."""
    total: Tensor = _all_reduce(x, operation, axis)
    return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.axis), None


def enter(x: Tensor, axis: str) -> Tensor:
    """Return x, which every rank has; its gradient is the sum of the ranks'."""
    same: Tensor = _Enter.apply(x, axis)  # type: ignore[no-untyped-call]  # torch's
    return same


@torch.library.custom_op("piper_core::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, ranks: int, axis: str) -> Tensor:
    """Return all ranks' x, one after another along ``dim``."""
    every = communicator().all_gather(x.contiguous(), axis)
    return every.view(ranks, *x.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()


@torch.library.custom_op("piper_core::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, ranks: int, axis: str) -> Tensor:
    """Return the rank's part along ``dim`` of the sum of all ranks' x."""
    parts = torch.cat(x.chunk(ranks, dim))
    return communicator().reduce_scatter(parts, axis)


@all_gather.register_fake
def _(x: Tensor, dim: int, ranks: int, axis: str) -> Tensor:
    return x.new_empty([size * ranks if i == dim else size for i, size in enumerate(x.shape)])


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, ranks: int, axis: str) -> Tensor:
    return x.new_empty([size // ranks if i == dim else size for i, size in enumerate(x.shape)])


def _keep_rest(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


all_gather.register_autograd(
    lambda ctx, gradient: (reduce_scatter(gradient, *ctx.rest), None, None, None), setup_context=_keep_rest
)
reduce_scatter.register_autograd(
    lambda ctx, gradient: (all_gather(gradient, *ctx.rest), None, None, None), setup_context=_keep_rest
)


@torch.library.custom_op("piper_core::all_to_all", mutates_args=())
def all_to_all(x: Tensor, axis: str) -> Tensor:
    """Return, of x (ranks, ...), what each rank has for this one."""
    even = [1] * len(x)
    return communicator().all_to_all(x.contiguous(), even, even, axis)


@all_to_all.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape)


all_to_all.register_autograd(lambda ctx, gradient: (all_to_all(gradient, *ctx.rest), None), setup_context=_keep_rest)


# --- as many rows as there are ---


@torch.library.custom_op("piper_core::dispatch", mutates_args=())
def dispatch(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Tensor:
    """Send rows (n, ...), sorted by expert, to where their experts are; return those that arrive, sorted by expert.

    ``counts`` (experts,) are this rank's rows for each expert, ``arriving`` (ranks, experts here) those that each rank
    has for this one. A trace takes as many to arrive as leave.
    """
    leave, arrive = rows_by_rank(counts, arriving)
    return communicator().all_to_all(rows.contiguous(), arrive, leave, axis).index_select(0, by_expert(arriving))


@torch.library.custom_op("piper_core::collect", mutates_args=())
def collect(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Tensor:
    """Undo :func:`dispatch`: send what experts made of rows back to where they came from, in the order they had."""
    leave, arrive = rows_by_rank(counts, arriving)
    return communicator().all_to_all(unsorted(rows, arriving), leave, arrive, axis)


@torch.library.custom_op("piper_core::gather_rows", mutates_args=())
def gather_rows(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    """Return the rows of all ranks, sorted by expert; ``counts`` (ranks, experts) are every rank's, whose own rows are
    sorted by expert. A trace takes every rank to have as many."""
    sizes = counts.sum(1).tolist()
    if len(set(sizes)) == 1:
        every = communicator().all_gather(rows.contiguous(), axis)
    else:
        every = communicator().all_to_all(rows.repeat(len(sizes), 1), sizes, [len(rows)] * len(sizes), axis)
    return every.index_select(0, by_expert(counts))


@torch.library.custom_op("piper_core::scatter_rows", mutates_args=())
def scatter_rows(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    """Return this rank's own rows, in the order they had before :func:`gather_rows`, of the sum of all ranks' rows."""
    sizes, apart = counts.sum(1).tolist(), unsorted(rows, counts)
    if len(set(sizes)) == 1:
        return communicator().reduce_scatter(apart, axis)
    mine = sizes[communicator().rank(axis)]
    parts = communicator().all_to_all(apart, [mine] * len(sizes), sizes, axis)
    return parts.view(len(sizes), mine, *rows.shape[1:]).sum(0)


def by_expert(counts: Tensor) -> Tensor:
    """Return the order that brings rows sorted by rank and then by expert, ``counts`` (ranks, experts), into the order
    of experts and then of ranks."""
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten()).sort(stable=True).indices


def unsorted(rows: Tensor, counts: Tensor) -> Tensor:
    """Return rows sorted by expert in the order of ranks again."""
    return torch.empty_like(rows).index_copy_(0, by_expert(counts), rows)


def rows_by_rank(counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows leave for each rank, and how many arrive from it."""
    return counts.view(len(arriving), -1).sum(1).tolist(), arriving.sum(1).tolist()


@dispatch.register_fake
def _(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Tensor:
    return rows.new_empty(rows.shape)


@collect.register_fake
def _(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Tensor:
    return rows.new_empty(rows.shape)


@gather_rows.register_fake
def _(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    return rows.new_empty(rows.shape[0] * counts.shape[0], *rows.shape[1:])


@scatter_rows.register_fake
def _(rows: Tensor, counts: Tensor, axis: str) -> Tensor:
    return rows.new_empty(rows.shape[0] // counts.shape[0], *rows.shape[1:])


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:-1])
    ctx.axis = inputs[-1]


dispatch.register_autograd(
    lambda ctx, gradient: (collect(gradient, *ctx.saved_tensors, ctx.axis), None, None, None),
    setup_context=_keep_counts,
)
collect.register_autograd(
    lambda ctx, gradient: (dispatch(gradient, *ctx.saved_tensors, ctx.axis), None, None, None),
    setup_context=_keep_counts,
)
gather_rows.register_autograd(
    lambda ctx, gradient: (scatter_rows(gradient, *ctx.saved_tensors, ctx.axis), None, None),
    setup_context=_keep_counts,
)
scatter_rows.register_autograd(
    lambda ctx, gradient: (gather_rows(gradient, *ctx.saved_tensors, ctx.axis), None, None),
    setup_context=_keep_counts,
)
