"""The one line from a program to a verified plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piper_core.ir.dag import Dag
from piper_core.program.program import Program
from piper_core.schedule.lower import ChannelRule, Costs, lower
from piper_core.schedule.plan import Plan
from piper_core.schedule.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from piper_core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program applied, lowered and proved to run."""

    dag: Dag
    plan: Plan


def compile_program(
    program: Program,
    dag: Dag,
    mesh: Mesh | None = None,
    *,
    costs: Callable[[Dag], Costs] | None = None,
    channels: ChannelRule = ChannelRule.FULL,
) -> Compiled:
    """Apply a program to a base DAG, lower it, and verify the plan.

    ``costs`` prices the compiled DAG for the list scheduler, where the order is partial (default: by FLOPs).

    Raises:
        DirectiveError: a directive does not apply; PlanError: the plan would not run; InfeasibleError: a limit
        that the list scheduler cannot meet.
    """
    compiled = program.apply(dag, mesh)
    plan = lower(compiled, costs(compiled) if costs else None, channels=channels)
    verify(plan)
    return Compiled(compiled, plan)
