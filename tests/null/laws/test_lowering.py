"""Programs that once became plans that do not run, or that the verifier refused though they run."""

from __future__ import annotations

from typing import Any

import pytest

from piper_core.arch.synthetic import synthetic
from piper_core.ir.dag import training_dag
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program
from piper_core.schedule.plan import expand
from piper_core.schedule.verify import verify
from tests.null.laws.interpreter import fault

SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}
PLACE = [{"op": "place", "filter": {"PP": s}, "devices": [4 * s, 4 * s + 1, 4 * s + 2, 4 * s + 3]} for s in range(2)]
ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ACROSS = [[0, 2], [1, 3], [4, 6], [5, 7]]
ZERO_3 = {"op": "replicate", "filter": {}, "devices": ROWS, "shard_grads": True, "shard_params": True}
AGAIN = {"op": "recompute", "filter": {}, "policy": "full"}


def shard(kind: str, groups: list[list[int]], **more: object) -> dict[str, Any]:
    return {"op": "shard", "filter": {"EP": "*"} if kind == "expert" else {}, "devices": groups, "kind": kind, **more}


def order(*rows: str) -> dict[str, Any]:
    return {"op": "order", "actions": {str(r): row for r, row in enumerate(rows)}}


CASES: dict[str, list[dict[str, Any]]] = {
    "buckets freed in another order than gathered, since R comes early": [
        *PLACE,
        ZERO_3 | {"prefetch": 2},
        AGAIN,
        order("0F0 0F1 0R1 0R0 0F2 0F3 0B0 0B1 0R2 0B2 0R3 0B3", "1F0 1R0 1F1 1R1 1B0 1B1 1F2 1F3 1R3 1R2 1B2 1B3"),
    ],
    "overlap group that the list scheduler takes apart": [
        *PLACE,
        shard("expert", ROWS, stream="ep"),
        {"op": "replicate", "filter": {}, "devices": ROWS},
        {
            "op": "order",
            "filters": [
                [{"PP": 1, "MB": 0, "PASS": "F"}, {"PP": 1, "MB": 3, "PASS": "F"}],
                [{"PP": 1, "MB": 3, "PASS": "BI"}],
            ],
        },
    ],
    "recompute inside an overlapped backward, before the gradient is there": [
        *PLACE,
        shard("tensor", PAIRS),
        AGAIN,
        order("0F0 0F1 (0F2 0B0) (0F3 0B1) 0B2 0B3", "1F0 1B0 (1F1 1F2) 1B1 (1F3 1B2) 1B3"),
    ],
    "the head gathers again what its own forward kept": [
        *PLACE,
        shard("sequence", PAIRS),
        order("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 (1F1 1B0) (1F2 1B1) (1F3 1B2) 1B3"),
    ],
    "collectives of a weight gradient that runs beside another backward": [
        *PLACE,
        shard("sequence", PAIRS),
        order("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1BI0 1F1 (1BW0 1B1) 1F2 1BI2 (1F3 1BW2) 1B3"),
    ],
    "pieces of equal name that do unequal work": [
        *PLACE,
        ZERO_3 | {"bucket_size": 1},
        AGAIN,
        order("0F0 0F1 0BI0 0BW0 (0F2 0B1) 0F3 0B2 0BI3 0BW3", "1F0 1B0 (1F1 1F2) 1B1 (1F3 1BI2) 1BW2 1B3"),
    ],
    "reductions that two rows make in one order, though they are ready in two": [
        *(
            {"op": "place", "filter": {"PP": s, "MB": "0-1" if s == r else "2-3"}, "devices": ROWS[r]}
            for s in (0, 1)
            for r in (0, 1)
        ),
        {"op": "replicate", "filter": {}, "devices": ROWS, "shard_optimizer": True},
        order("0F0 0F1 1F2 1B2 1F3 1B3 0B0 0B1", "1F0 1F1 0F2 0F3 1B0 1B1 0B2 0B3"),
    ],
    "experts and tensors on a grid, everything apart": [
        *PLACE,
        shard("tensor", PAIRS),
        shard("expert", ACROSS, stream="ep"),
        {"op": "replicate", "filter": {}, "devices": ACROSS, "shard_grads": True, "shard_params": True},
        order("0F0 0F1 (0F2 0B0) (0F3 0B1) 0B2 0B3", "1F0 1BI0 (1F1 1BW0) 1B1 (1F2 1F3) 1B2 1B3"),
    ],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layers", [2, 8])
def test_runs(name: str, layers: int) -> None:
    kind = "moe" if any(data.get("kind") == "expert" for data in CASES[name]) else "dense"
    dag = training_dag(synthetic(f"{kind}:{layers}", 2, hidden=512))
    plan = compile_program(Program.parse([SPLIT, *CASES[name]]), dag).plan
    assert fault(plan) is None
    verify(expand(plan))
    assert fault(expand(plan)) is None
