"""Expert parallelism: each rank holds an equal part of the experts, and copies of tokens go to where their expert is.

Nothing is dropped: ranks first exchange how many copies they have for each expert, then the copies themselves, as many
as there are, none included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from piper_core.frontend import exchange
from piper_core.frontend.shares import divide
from piper_core.models.grouped import GroupedLinear
from piper_core.models.moe import Experts

AXIS = "expert"
Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def parallelize_experts(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """Leave this rank its part of each mixture's experts, in place; routers and shared experts stay whole.

    A mixture that tensor parallelism divides is divided first: dispatch comes before what its ranks gather.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            for child in module.children():
                if isinstance(child, GroupedLinear):
                    divide(child, "weight", AXIS, 0, rank, ranks)
                    divide(child, "bias", AXIS, 0, rank, ranks)
            module.compute = partial(_compute, module.compute, ranks)  # type: ignore[method-assign]  # its purpose
    return model


def _compute(inner: Compute, ranks: int, rows: Tensor, counts: Tensor) -> Tensor:
    """Return what experts make of rows (n, hidden), sorted by expert, wherever those are."""
    arriving = exchange.all_to_all(counts.view(ranks, -1), AXIS)
    here = exchange.dispatch(rows, counts, arriving, AXIS)
    y: Tensor = exchange.collect(inner(here, arriving.sum(0)), counts, arriving, AXIS)
    return y
