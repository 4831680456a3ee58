"""Programs on synthetic models, by hand and at random, for the tests of simulator, prices and memory."""

from __future__ import annotations

from random import Random
from typing import Any

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.synthetic import synthetic
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.schedule.compile import Compiled
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Layout, rows_of_stage
from piper_core.schedule.lower import lower

ZERO: tuple[dict[str, bool], ...] = (
    {}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_grads": True, "shard_params": True},
)  # fmt: skip


def program(
    family: str | None, p: int, m: int, v: int = 1, *, dp: int = 1, tp: int = 1, zero: int = 0,
    bucket: int | None = None, experts: bool = False, sequence: bool = False, recompute: str | None = None,
    prefetch: int = 1,
) -> Program:  # fmt: skip
    """Return a program for a model with PP tags: p rows of dp x tp ranks, in the family's layout (loop without one)."""
    layout = get_family(family).layout if family else Layout.LOOP
    data: list[dict[str, Any]] = [{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m}]
    for stage, rows in enumerate(rows_of_stage(layout, p, v)):
        ranks = [[row * dp * tp + i for i in range(dp * tp)] for row in rows]
        for half, devices in enumerate(ranks):
            part = f"{half * m // len(ranks)}-{(half + 1) * m // len(ranks) - 1}"
            where: dict[str, Any] = {"PP": stage} | ({"MB": part} if len(ranks) > 1 else {})
            data.append({"op": "place", "filter": where, "devices": devices})
        flat = sorted(rank for devices in ranks for rank in devices)
        if tp > 1:
            groups = [flat[i : i + tp] for i in range(0, len(flat), tp)]
            kind = "sequence" if sequence else "tensor"
            data.append({"op": "shard", "filter": {"PP": stage}, "devices": groups, "kind": kind})
        if dp > 1:
            rings = [[base + i * tp for i in range(dp)] for row in ranks for base in row[:tp]]
            options = ZERO[zero] | ({"bucket_size": bucket} if bucket else {})
            data.append({"op": "replicate", "filter": {"PP": stage}, "devices": rings, "prefetch": prefetch} | options)
            if experts:
                data.append({"op": "shard", "filter": {"PP": stage, "EP": "*"}, "devices": rings})
    if recompute:
        data.append({"op": "recompute", "filter": {}, "policy": recompute})
    if family:
        rows_of = get_family(family).grid(p, m, v).rows
        data.append({"op": "order", "actions": {str(r): format_slots(row) for r, row in enumerate(rows_of)}})
    return Program.parse(data)


def build(
    family: str | None, p: int, m: int, v: int = 1, *, model: str | ModelChunks = "dense:8",
    sync: Sync = Sync.GLOBAL_NORM, global_batch: int | None = None, look_ahead: int = 1, **options: Any,
) -> Compiled:  # fmt: skip
    """Compile :func:`program` on a synthetic model, without the verifier (which tests of its own cover)."""
    layout = get_family(family).layout if family else Layout.LOOP
    stages = p if layout is Layout.BIDIRECTIONAL else p * v
    table = synthetic(model, stages) if isinstance(model, str) else model
    base = training_dag(table, sync=sync, global_batch=global_batch)
    dag: Dag = program(family, p, m, v, **options).apply(base)
    return Compiled(dag, lower(dag, look_ahead=look_ahead))


def random_case(rng: Random) -> Compiled:
    """Compile a random family, degrees, sharding, ZeRO stage, recompute and barrier."""
    family = rng.choice([*FAMILIES, None])
    while True:
        p, m = rng.randint(1, 4), rng.randint(1, 8)
        if family is None:
            v = 1
            break
        rule = get_family(family)
        v = rng.choice(rule.virtual_stages(p)[:2])
        if p in rule.degrees() and m in rule.microbatches(p, v):
            break
    two_rows = family == "dualpipe"
    dp, tp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    moe = rng.random() < 0.5
    return build(
        family, p, m, v, model=f"{'moe' if moe else 'dense'}:{max(p * v, 4) + rng.randrange(4)}",
        sync=rng.choice(list(Sync)), look_ahead=rng.randrange(3),
        dp=dp, tp=tp, zero=rng.randrange(2 if two_rows else 4), bucket=rng.choice([None, 1]),
        experts=moe and dp > 1 and not two_rows, sequence=rng.random() < 0.5,
        recompute=rng.choice([None, None, "full", "selective"]), prefetch=rng.randrange(3),
    )  # fmt: skip
