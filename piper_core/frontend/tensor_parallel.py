"""Tensor and sequence parallelism of a model: each module by its style."""

from __future__ import annotations

from torch import nn

from piper_core.errors import ConfigError
from piper_core.frontend.mixture_plan import mixture_plan
from piper_core.frontend.sharding_plan import Style, TensorGroup, block_plan
from piper_core.frontend.vocabulary import divide_loss, embed_plan, head_plan
from piper_core.models.transformer import Block, Embed, Head, tie


def parallelize(module: nn.Module, group: TensorGroup) -> nn.Module:
    """Divide a model, or its embedding, a block or its head, over the ranks of ``group``, in place.

    Raises:
        ConfigError: a module of another kind, for which no plan is known.
    """
    plan: dict[str, Style] = {}
    heads: list[Head] = []
    for name, part in module.named_modules():
        found: dict[str, Style] = {}
        match part:
            case Embed():
                found = embed_plan(part, group)
            case Block():
                found = block_plan(part, group) | mixture_plan(part, group)
            case Head():
                found = head_plan(group)
                heads.append(part)
            case _:
                pass
        plan |= {f"{name}.{child}" if name else child: style for child, style in found.items()}
    if not plan:
        raise ConfigError(f"no tensor parallel plan is known for a {type(module).__name__}; use a built-in model")
    for name, style in plan.items():
        style.apply(module.get_submodule(name))
    tie(module)
    for head in heads:
        divide_loss(head, group)
    return module
