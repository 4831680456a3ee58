"""Divisions of work that would compute wrong gradients are refused; those that would not are taken."""

from __future__ import annotations

from typing import Any

import pytest

from piper_core.arch.synthetic import synthetic
from piper_core.errors import DirectiveError
from piper_core.ir.dag import training_dag
from piper_core.passes.gradient_sync import bucket_ranks
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program

Data = dict[str, Any]
ROWS: list[Data] = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
    {"op": "place", "filter": {"PP": 1}, "devices": [2, 3]},
]
BOTH: list[Data] = [
    {"op": "place", "filter": {"PP": s, "MB": mb}, "devices": row}
    for s in (0, 1)
    for mb, row in (("0-1", [2 * s, 2 * s + 1]), ("2-3", [2 - 2 * s, 3 - 2 * s]))
]
ONE: list[Data] = [{"op": "place", "filter": {}, "devices": [0, 1, 2, 3]}]
DP0: Data = {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 1]}
DP1: Data = {"op": "replicate", "filter": {"PP": 1}, "devices": [2, 3]}


def shard(kind: str, filter_: Data, devices: Any) -> Data:
    return {"op": "shard", "filter": filter_, "devices": devices, "kind": kind}


def replicate(filter_: Data, devices: Any, **more: bool) -> Data:
    return {"op": "replicate", "filter": filter_, "devices": devices, **more}


GRID = [[0, 1], [2, 3]]
REFUSED = {
    "replicated on one row alone": ([*ROWS, DP0], "differently"),
    "data on one row, tensor on the other": ([*ROWS, DP0, shard("tensor", {"PP": 1}, [2, 3])], "differently"),
    "sequence on one row alone": ([*ROWS, shard("sequence", {"PP": 0}, [0, 1])], "differently"),
    "context on one row, data on the other": ([*ROWS, shard("context", {"PP": 0}, [0, 1]), DP1], "differently"),
    "ranks in another order on the other row": (
        [ROWS[0], {"op": "place", "filter": {"PP": 1}, "devices": [3, 2]}, DP0, DP1], "differently",
    ),
    "sequence on mlp alone": ([*ROWS, shard("sequence", {"REGION": "mlp"}, GRID)], "differently"),
    "replicate on some layers": ([*ROWS, replicate({"LAYER": "0-2"}, [0, 1])], "differently"),
    "replicate for some microbatches": ([*ROWS, replicate({"MB": "1-3"}, GRID)], "microbatches"),
    "tensor for some microbatches": ([*ROWS, shard("tensor", {"MB": 0}, GRID)], "microbatches"),
    "ZeRO of some microbatches": (
        [*ROWS, replicate({"MB": 0}, GRID, shard_optimizer=True), replicate({"MB": "1-3"}, GRID)], "microbatches",
    ),
    "data on one of a stage's two rows": ([*BOTH, replicate({"MB": "0-1"}, GRID)], "rows that divide it"),
    "tensor shards in another order on the other row": (
        [*BOTH, shard("tensor", {"MB": "0-1"}, [[0, 1], [2, 3]]), shard("tensor", {"MB": "2-3"}, [[1, 0], [3, 2]])],
        "microbatches|rows that divide it",
    ),
    "a group across stages": ([*ROWS, replicate({}, [[0, 2], [1, 3]])], "hold different stages"),
    "experts over ranks with the same tokens": ([*ONE, shard("expert", {"REGION": "expert"}, GRID)], "same tokens"),
    "experts replicated apart from the rest": (
        [*ONE, shard("expert", {"REGION": "expert"}, GRID), replicate({"REGION": "expert"}, GRID),
         replicate({"REGION": ["embed", "attention", "router", "head"]}, [0, 1, 2, 3])], "differently",
    ),
}  # fmt: skip
TAKEN = {
    "data on both rows": [*ROWS, DP0, DP1],
    "tensor on one row alone": [*ROWS, shard("tensor", {"PP": 0}, [0, 1])],
    "two context methods": [
        *ROWS, shard("context", {"PP": 0}, [0, 1]), shard("context", {"PP": 1}, [2, 3]) | {"method": "all_to_all"},
    ],
    "a stage on two rows": [*BOTH, replicate({}, GRID)],
    "experts inside the replicas": [*ONE, shard("expert", {"REGION": "expert"}, GRID), replicate({}, [0, 1, 2, 3])],
    "recompute of some microbatches": [*ROWS, DP0, DP1, {"op": "recompute", "filter": {"MB": 0}, "policy": "full"}],
}  # fmt: skip


def program(data: list[Data]) -> Program:
    return Program.parse([*data, {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}])


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED)
def test_wrong_gradients_are_refused(data: list[Data], words: str) -> None:
    stages = 1 if data[0] is ONE[0] else 2
    with pytest.raises(DirectiveError, match=words):
        program(data).apply(training_dag(synthetic("moe:6" if stages == 1 else "dense:6", stages)))


@pytest.mark.parametrize("data", TAKEN.values(), ids=TAKEN)
def test_right_ones_are_taken(data: list[Data]) -> None:
    stages = 1 if data[0] is ONE[0] else 2
    compile_program(program(data), training_dag(synthetic("moe:6" if stages == 1 else "dense:6", stages)))


def test_experts_of_a_stage_on_two_rows_meet_their_like() -> None:
    """Rows [0..3] and [4..7], data groups of 2, expert groups of 2 inside them, tensor groups of 2."""
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    data = [{"op": "place", "filter": {"PP": s, "MB": mb}, "devices": rows[s ^ half]}
            for s in (0, 1) for half, mb in enumerate(("0-1", "2-3"))]  # fmt: skip
    over = [[0, 2], [1, 3], [4, 6], [5, 7]]
    data += [shard("expert", {"REGION": "expert"}, over), shard("tensor", {}, [[0, 1], [2, 3], [4, 5], [6, 7]])]
    dag = program([*data, replicate({}, over)]).apply(training_dag(synthetic("moe:6", 2)))
    experts = [bucket for bucket in dag.buckets if bucket.expert]
    assert experts
    for bucket in experts:
        groups = bucket_ranks(dag, bucket)
        assert bucket.ranks == 2
        assert {len(group) for group in groups} == {2}


def test_no_stage_and_a_replicate() -> None:
    data = [{"op": "place", "filter": {}, "devices": [0, 1]}, replicate({}, [0, 1])]
    made = compile_program(Program.parse(data), training_dag(synthetic("dense:8")))
    assert made.plan.stages == 1


def test_recompute_of_some_microbatches_with_buckets() -> None:
    zero3 = replicate({}, GRID, shard_grads=True, shard_params=True) | {"bucket_size": 1}
    data = [*ROWS, zero3, {"op": "recompute", "filter": {"MB": 0}, "policy": "full"}]
    compile_program(program(data), training_dag(synthetic("dense:100", 2)))
