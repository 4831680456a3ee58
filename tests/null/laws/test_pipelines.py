"""Every family through the whole pipeline: program, DAG, plan, verifier; with every way to divide the work."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

import pytest

from piper_core.arch.synthetic import synthetic
from piper_core.directives import Order
from piper_core.errors import ScheduleError
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.ir.verify import verify_dag
from piper_core.names import Phase
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Layout, rows_of_stage
from piper_core.schedule.plan import expand
from piper_core.schedule.plan_text import format_plan, parse_plan
from piper_core.schedule.verify import verify
from tests.null.laws.interpreter import fault

DEGREES = range(1, 17)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ZeRO-0": {"zero": 0},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2},
    "ZeRO-3": {"zero": 3},
    "ZeRO-3 in buckets": {"zero": 3, "bucket_size": 1, "prefetch": 2},
    "experts": {"zero": 1, "expert": True},
    "experts overlapped, ZeRO-3": {"zero": 3, "expert": True, "stream": "ep"},
    "recompute full": {"zero": 0, "recompute": "full"},
    "recompute selective, ZeRO-3": {"zero": 3, "recompute": "selective"},
    "tensor": {"inner": "tensor"},
    "sequence, recompute full": {"inner": "sequence", "recompute": "full", "zero": 2},
    "sequence without regather": {"inner": "sequence", "regather": False},
    "context ring": {"inner": "context", "zero": 1},
    "context all_to_all, ZeRO-3": {"inner": "context", "method": "all_to_all", "zero": 3},
}
"""``zero`` asks for two replicas, ``inner`` for a grid of two ranks that share each of them."""


@cache
def model(kind: str, stages: int) -> Dag:
    return training_dag(synthetic(f"{kind}:{stages}", stages, hidden=256))


def build(family: str, p: int, m: int, v: int, way: dict[str, Any]) -> tuple[Dag, Program]:
    """Return the program of a family at its degrees, its work divided in a named way."""
    chosen = get_family(family)
    homes = rows_of_stage(chosen.layout, p, v)
    inner = 2 if "inner" in way else 1
    width = inner * (2 if "zero" in way or "expert" in way else 1)
    rows = [list(range(r * width, (r + 1) * width)) for r in range(p)]
    made: list[dict[str, Any]] = [{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m}]
    for stage, on in enumerate(homes):
        for k, row in enumerate(on):
            half = {} if len(on) == 1 else {"MB": f"{k * m // 2}-{(k + 1) * m // 2 - 1}"}
            made.append({"op": "place", "filter": {"PP": stage, **half}, "devices": rows[row], "stream": "p2p"})
    if inner > 1:
        pairs = [row[i : i + 2] for row in rows for i in range(0, width, 2)]
        extra = {key: way[key] for key in ("method", "regather") if key in way}
        made.append({"op": "shard", "filter": {}, "devices": pairs, "kind": way["inner"], **extra})
    across = [row[i::inner] for row in rows for i in range(inner)]
    if "expert" in way:
        stream = {"stream": way["stream"]} if "stream" in way else {}
        made.append({"op": "shard", "filter": {"EP": "*"}, "devices": across, **stream})
    if "zero" in way:
        zero = way["zero"] if chosen.layout is not Layout.BIDIRECTIONAL else min(way["zero"], 1)
        flags = {"shard_optimizer": zero == 1, "shard_grads": zero >= 2, "shard_params": zero == 3}
        extra = {key: way[key] for key in ("bucket_size", "prefetch") if key in way}
        made.append({"op": "replicate", "filter": {}, "devices": across, **flags, **extra})
    if "recompute" in way:
        made.append({"op": "recompute", "filter": {}, "policy": way["recompute"]})
    grid = chosen.grid(p, m, v)
    made.append({"op": "order", "actions": {str(r): format_slots(row) for r, row in enumerate(grid.rows)}})
    return model("moe" if "expert" in way else "dense", len(homes)), Program.parse(made)


def microbatches(family: str, p: int, v: int) -> list[int]:
    legal = get_family(family).microbatches(p, v)
    return sorted({m for m in (1, p, p + 1, 2 * p, 2 * p + 2) if m in legal})


def virtual(family: str, p: int) -> list[int]:
    return [2, 3] if family == "interleaved_1f1b" else [get_family(family).virtual_stages(p)[0]]


@pytest.mark.parametrize("p", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_degree(family: str, p: int) -> None:
    """Several microbatch counts, each with the next way to divide the work: p rows, 2p stages for V families."""
    if p not in get_family(family).degrees():
        with pytest.raises(ScheduleError):
            get_family(family).grid(p, 2 * p, 1)
        return
    turn = count(p * 7)
    for v in virtual(family, p):
        for m in microbatches(family, p, v)[-3 if p < 9 else -1 :]:
            dag, program = build(family, p, m, v, list(WAYS.values())[next(turn) % len(WAYS)])
            compiled = compile_program(program, dag)
            plan = compiled.plan
            assert not plan.derived
            assert len(plan.rows) == p
            assert plan.stages == len(rows_of_stage(get_family(family).layout, p, v))
            if p <= 4:
                verify_dag(compiled.dag)
                assert fault(plan) is None
                verify(expand(plan))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("p", [2, 4])
def test_every_family_in_every_way(p: int, family: str, way: str) -> None:
    for v in virtual(family, p)[:1]:
        for m in microbatches(family, p, v)[-2 if p == 2 else -1 :]:
            dag, program = build(family, p, m, v, WAYS[way])
            compiled = compile_program(program, dag)
            verify_dag(compiled.dag)
            assert fault(compiled.plan) is None
            processes = expand(compiled.plan)
            verify(processes)
            assert fault(processes) is None
            assert parse_plan(format_plan(compiled.plan)).same_as(compiled.plan)
            assert parse_plan(format_plan(processes)).same_as(processes)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_emit_lies_in_the_domain(family: str) -> None:
    """The order directive of a family is legal where its own layout is placed."""
    for p in (1, 2, 3, 4, 6, 8):
        if p not in get_family(family).degrees():
            continue
        for v in virtual(family, p):
            for m in microbatches(family, p, v):
                dag, program = build(family, p, m, v, {})
                (order,) = (each for each in program.directives if isinstance(each, Order))
                rest = Program(tuple(each for each in program.directives if each is not order))
                placed = Program((*rest.directives, *halves(order))).apply(dag)
                assert order in Order.domain(placed)
                assert Order.parse(order.to_data()) == order


def halves(order: Order) -> tuple[Order, ...]:
    """Return an order that lowers the backwards that another one names in parts, and says nothing more."""
    named = sorted(
        {
            (a.stage, a.microbatch or 0)
            for _, slots in order.actions
            for slot in slots
            for a in slot
            if a.kind == Phase.BI.name
        }
    )
    return tuple(
        Order.parse(
            {"op": "order", "filters": [[{"PP": s, "MB": m, "PASS": "BI"}], [{"PP": s, "MB": m, "PASS": "BW"}]]}
        )
        for s, m in named
    )
