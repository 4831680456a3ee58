"""What compute, communication and updates cost: the ``CostModel`` seam and its implementations."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search.cost.base import OVERLAP_SLOWDOWN, CostModel
    from search.cost.roofline import RooflineCost

_HOME = {"CostModel": "base", "OVERLAP_SLOWDOWN": "base", "RooflineCost": "roofline"}
__all__ = ["OVERLAP_SLOWDOWN", "CostModel", "RooflineCost"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
