"""Small strategies of every kind that exporters must describe."""

from __future__ import annotations

from typing import Any

from piper_core.ir.action import format_slots
from piper_core.program.strategy import Strategy
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import rows_of_stage

MODEL = "piper-1b"


def pipeline(
    family: str, p: int, m: int, v: int = 1, *, layers: list[int] | None = None, model: str = MODEL, total: int = 16,
    row: int = 1, more: list[dict[str, Any]] | None = None, **header: Any,
) -> Strategy:  # fmt: skip
    """Return a pipeline of ``p`` rows of ``row`` ranks in the order of a family, with ``more`` directives."""
    found = get_family(family)
    laid = rows_of_stage(found.layout, p, v)
    stages = len(laid)
    layers = layers or [total // stages + (stage < total % stages) for stage in range(stages)]
    directives: list[dict[str, Any]] = [
        {"op": "stage", "layers_per_stage": layers},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m},
    ]
    for stage, held in enumerate(laid):
        for half, at in enumerate(held):
            some = {"MB": f"{half * m // 2}-{(half + 1) * m // 2 - 1}"} if len(held) > 1 else {}
            devices = list(range(at * row, (at + 1) * row))
            directives.append({"op": "place", "filter": {"PP": stage} | some, "devices": devices})
    directives += more or []
    grid = found.grid(p, m, v)
    directives.append({"op": "order", "actions": {str(i): format_slots(slots) for i, slots in enumerate(grid.rows)}})
    head = {"model": model, "cluster": "p4de", "mesh": {"pp": p, "dp": row}, "global_batch": m * row,
            "seq_len": 1024, "schedule": family}  # fmt: skip
    return Strategy.parse(head | header | {"directives": directives})


def data_parallel(**more: Any) -> dict[str, Any]:
    """Return a replicate directive over axis dp."""
    return {"op": "replicate", "filter": {}, "axis": "dp", **more}
