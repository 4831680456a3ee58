"""Automatic annotation: layers of a model, and attention, MLP, router and experts inside each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from piper_core.frontend.annotate import CHILD, LAYER, REGION, is_open, recording, tagged
from piper_core.names import Region

_NAMES: dict[str, Region] = {
    **dict.fromkeys(("attention", "attn", "self_attn", "self_attention", "mixer"), Region.ATTENTION),
    **dict.fromkeys(("mlp", "feed_forward", "ffn", "ff"), Region.MLP),
    **dict.fromkeys(("router", "gate"), Region.ROUTER),
    **dict.fromkeys(("experts", "expert", "shared_expert", "shared_experts", "shared"), Region.EXPERT),
}


@contextmanager
def annotated(model: nn.Module, layers: dict[nn.Module, int] | None = None) -> Iterator[None]:
    """Annotate calls of the model's parts inside the context: layers by index, and regions by their modules' names.

    Where the person has annotated what runs (``is_open``), theirs stands. ``layers`` gives other indices than those of
    :func:`repeated`.
    """
    with ExitStack() as stack:
        for block, index in (repeated(model) if layers is None else layers).items():
            _region_modules(block, stack)
            _wrap(block, stack, partial(_unless_open, LAYER, index))
        for child in model.children():
            if region := _region_of(child):
                _wrap(child, stack, partial(_unless_open, REGION, str(region)))
        _wrap(model, stack, recording)
        yield


def repeated(model: nn.Module) -> dict[nn.Module, int]:
    """Return the model's repeated blocks and their places: the list with most parameters whose children are modules
    of one class with parts of their own, and not inside another such list (a sequence of one is no list)."""
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > isinstance(module, nn.Sequential)
        and len({type(child) for child in module}) == 1 and any(True for _ in module[0].children())
    ]  # fmt: skip
    outer = [
        (size, name, module)
        for size, name, module in lists
        if not any(name != other and name.startswith(f"{other}." if other else "") for _, other, _ in lists)
    ]
    if not outer:
        return {}
    blocks = max(outer, key=lambda each: (each[0], each[1]))[2]
    return {block: index for index, block in enumerate(blocks)}


def _region_modules(block: nn.Module, stack: ExitStack) -> None:
    """Annotate the calls of a block's children; those without a region get a number, see ``assign``."""
    for name, child in block.named_children():
        region = _region_of(child) or _NAMES.get(name)
        inner = {_region_of(c) or _NAMES.get(n) for n, c in child.named_children()}
        if region in (None, Region.MLP) and Region.EXPERT in inner:  # a mixture: its parts have regions
            _region_modules(child, stack)
        elif region is not None:
            _wrap(child, stack, partial(_unless_open, REGION, str(region)))
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            _wrap(child, stack, lambda: None if is_open(REGION) or is_open(CHILD) else tagged(**{CHILD: 1}))


def _region_of(module: nn.Module) -> Region | None:
    """Return the region that a module says it computes."""
    region = getattr(module, "region", None)
    return region if isinstance(region, Region) else None


def _unless_open(tag: str, value: int | str) -> AbstractContextManager[None] | None:
    return None if is_open(tag) else tagged(**{tag: value})


def _wrap(module: nn.Module, stack: ExitStack, scope: Callable[[], AbstractContextManager[None] | None]) -> None:
    """Run ``module.forward`` inside ``scope()`` (None: as it is) until ``stack`` closes."""
    inner = module.forward
    own = "forward" in vars(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        entered = scope()
        if entered is None:
            return inner(*args, **kwargs)
        with entered:
            return inner(*args, **kwargs)

    module.forward = forward

    def undo() -> None:
        if own:
            module.forward = inner
        else:
            del module.forward

    stack.callback(undo)
