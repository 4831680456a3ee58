"""The language of strategies and the machine that checks and runs them. Names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_core.arch import Architecture, ModelChunks, model_chunks, preset
    from piper_core.arch.synthetic import synthetic
    from piper_core.errors import (
        ConfigError,
        DirectiveError,
        InfeasibleError,
        PiperError,
        PlanError,
        ProgramError,
        RunError,
        ScheduleError,
    )
    from piper_core.frontend.annotate import annotate
    from piper_core.frontend.trace import trace_model
    from piper_core.ir.action import Action
    from piper_core.ir.dag import Dag, training_dag
    from piper_core.mesh import Mesh
    from piper_core.program.program import Program
    from piper_core.program.strategy import Header, Strategy, base_dag, dump, load, loads
    from piper_core.program.upstream import to_upstream
    from piper_core.runtime.optimizer import SGD, AdamW, Clip
    from piper_core.runtime.trainer import Trainer
    from piper_core.schedule.compile import Compiled, compile_program
    from piper_core.schedule.families import FAMILIES, Family, get_family
    from piper_core.schedule.lower import Costs, lower
    from piper_core.schedule.plan import Plan, expand
    from piper_core.schedule.verify import verify

_HOME = {
    "arch": ("Architecture", "ModelChunks", "model_chunks", "preset"),
    "arch.synthetic": ("synthetic",),
    "errors": (
        "ConfigError", "DirectiveError", "InfeasibleError", "PiperError", "PlanError", "ProgramError", "RunError",
        "ScheduleError",
    ),
    "frontend.annotate": ("annotate",),
    "frontend.trace": ("trace_model",),
    "ir.action": ("Action",),
    "ir.dag": ("Dag", "training_dag"),
    "mesh": ("Mesh",),
    "program.program": ("Program",),
    "program.strategy": ("Header", "Strategy", "base_dag", "dump", "load", "loads"),
    "program.upstream": ("to_upstream",),
    "runtime.optimizer": ("AdamW", "Clip", "SGD"),
    "runtime.trainer": ("Trainer",),
    "schedule.compile": ("Compiled", "compile_program"),
    "schedule.families": ("FAMILIES", "Family", "get_family"),
    "schedule.lower": ("Costs", "lower"),
    "schedule.plan": ("Plan", "expand"),
    "schedule.verify": ("verify",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [  # noqa: RUF022  # by what they are for
    "PiperError", "ConfigError", "DirectiveError", "InfeasibleError", "PlanError", "ProgramError", "RunError",
    "ScheduleError",
    "Architecture", "ModelChunks", "Mesh", "annotate", "model_chunks", "preset", "synthetic", "trace_model",
    "Header", "Program", "Strategy", "dump", "load", "loads", "to_upstream",
    "Dag", "base_dag", "training_dag",
    "FAMILIES", "Family", "get_family",
    "AdamW", "Clip", "SGD", "Trainer",
    "Action", "Compiled", "Costs", "Plan", "compile_program", "expand", "lower", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
