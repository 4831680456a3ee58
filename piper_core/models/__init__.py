"""Torch modules of every architecture: :func:`build_model` and its parts. Names are imported when first used.

A module that computes exactly one region of the training DAG says so in ``region``. What is left out, everywhere:
dropout, key-value caches, padding masks; attention is full and causal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_core.models.build import build_block, build_embed, build_head, build_model
    from piper_core.models.init import initialise, initialise_parameter
    from piper_core.models.moe import counting, set_loss_weight, update_balance
    from piper_core.models.stage import Part, Stage, build_stage
    from piper_core.models.transformer import Transformer

_HOME = {
    "Part": "stage",
    "Stage": "stage",
    "Transformer": "transformer",
    "build_block": "build",
    "build_embed": "build",
    "build_head": "build",
    "build_model": "build",
    "build_stage": "stage",
    "counting": "moe",
    "initialise": "init",
    "initialise_parameter": "init",
    "set_loss_weight": "moe",
    "update_balance": "moe",
}
__all__ = [  # noqa: RUF022  # by kind
    "build_model", "build_block", "build_embed", "build_head", "build_stage",
    "Part", "Stage", "Transformer",
    "initialise", "initialise_parameter",
    "counting", "set_loss_weight", "update_balance",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
