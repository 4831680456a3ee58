"""The simulator: when every action of a plan runs, given how long each lasts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search.simulator.lower import ActionSeconds, CommKind, Lowered, action_seconds, lower_plan
    from search.simulator.run import Simulation, simulate

_HOME = {
    "ActionSeconds": "lower",
    "CommKind": "lower",
    "Lowered": "lower",
    "Simulation": "run",
    "action_seconds": "lower",
    "lower_plan": "lower",
    "simulate": "run",
}
__all__ = ["ActionSeconds", "CommKind", "Lowered", "Simulation", "action_seconds", "lower_plan", "simulate"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
