"""DAGs at every step of compilation, and instances of every directive."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from piper_core.arch.synthetic import synthetic
from piper_core.directives import parse_directive
from piper_core.ir.dag import NODE_COLUMNS, Dag, training_dag
from piper_core.mesh import Mesh
from piper_core.program.program import Program

MESH = Mesh.parse("pp=2,dp=2,tp=2")
ROWS = ([0, 1, 2, 3], [4, 5, 6, 7])
TENSOR = [[0, 1], [2, 3], [4, 5], [6, 7]]
DATA = [[0, 2], [1, 3], [4, 6], [5, 7]]

STAGE = {"op": "stage", "stages": 2}
SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}
PLACE = tuple({"op": "place", "filter": {"PP": s}, "devices": ROWS[s], "stream": "p2p"} for s in range(2))
BOTH_WAYS = tuple(
    {"op": "place", "filter": {"PP": s, "MB": "0-1" if s == r else "2-3"}, "devices": ROWS[r]}
    for s in (0, 1)
    for r in (0, 1)
)
SHARD = {"op": "shard", "filter": {}, "devices": TENSOR, "kind": "tensor"}
REPLICATE = {
    "op": "replicate",
    "filter": {},
    "devices": DATA,
    "shard_grads": True,
    "shard_params": True,
    "bucket_size": 1,
}
RECOMPUTE = {"op": "recompute", "filter": {}, "policy": "full"}
ORDER = {"op": "order", "actions": {"0": "0F0 0F1 0F2 0F3 0BI0 0BW0 0BI1 0BI2 0BW1 0BW2 0B3",
                                    "1": "1F0 1B0 (1F1 1F2) 1B1 1B2 1F3 1B3"}}  # fmt: skip

PROGRAMS: Mapping[str, tuple[Any, ...]] = {
    "base": (),
    "staged": (STAGE,),
    "split": (STAGE, SPLIT),
    "half placed": (STAGE, SPLIT, PLACE[0]),
    "placed": (STAGE, SPLIT, *PLACE),
    "placed both ways": (STAGE, SPLIT, *BOTH_WAYS),
    "sharded": (STAGE, SPLIT, *PLACE, SHARD),
    "sequence": (STAGE, SPLIT, *PLACE, SHARD | {"kind": "sequence"}),
    "replicated": (STAGE, SPLIT, *PLACE, SHARD, REPLICATE),
    "recomputed": (STAGE, SPLIT, *PLACE, SHARD, REPLICATE, RECOMPUTE),
}
"""Directives applied one by one, in canonical order."""

SINGLE: Mapping[str, tuple[Any, ...]] = {
    "base": (
        STAGE, {"op": "stage", "cuts": [1, 3]}, {"op": "stage", "layers_per_stage": [3, 1]}, SPLIT,
        {"op": "split", "filter": {"PASS": ["F", "B"]}, "dim_name": "SLICE", "num_microbatches": 3},
        {"op": "place", "filter": {}, "devices": [0]},
    ),
    "staged": (SPLIT, {"op": "place", "filter": {"PP": "*"}, "devices": [3, 1]}),
    "split": (*PLACE, *BOTH_WAYS),
    "placed": (
        SHARD, SHARD | {"kind": "sequence", "regather": False}, SHARD | {"kind": "context", "method": "all_to_all"},
        SHARD | {"kind": "context"},
        {"op": "shard", "filter": {"REGION": ["attention", "head"]}, "axis": "tp", "kind": "tensor"},
        {"op": "shard", "filter": {"EP": "*"}, "devices": TENSOR, "stream": "ep"},
        REPLICATE, REPLICATE | {"prefetch": 0},
        {"op": "replicate", "filter": {"PP": 0}, "devices": ROWS[0], "reduce_stream": "r"},
        {"op": "replicate", "filter": {}, "axis": "dp", "shard_optimizer": True, "gather_stream": "g"},
        RECOMPUTE, RECOMPUTE | {"policy": "selective"}, RECOMPUTE | {"filter": {"MB": [0, 2], "PP": 1}},
        {"op": "order", "actions": {"0": "0F0 0F1 0B0 (0F2 0B1) 0F3 0B2 0B3"}},
        {"op": "order", "filters": [[{"PP": 0, "MB": 1, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "B"}]]},
    ),
    "placed both ways": (
        {"op": "replicate", "filter": {}, "devices": [[0, 1, 2, 3], [4, 5, 6, 7]], "shard_optimizer": True},
        {"op": "order", "actions": {"1": "0F2 1F0 1B0 0B2 (1F1 0F3) 1B1 0B3"}},
    ),
    "sharded": (REPLICATE, {"op": "shard", "filter": {"EP": "*"}, "devices": DATA}, RECOMPUTE),
    "recomputed": (
        {"op": "order", "actions": {"0": "0F0 0F1 0R0 0R1 0B0 0B1 0F2 0F3 0R3 0B3 0R2 0B2"}},
        {"op": "order", "filters": [[{"PP": 0, "MB": 1, "PASS": "R"}], [{"PP": 0, "MB": 0, "PASS": "B"}]]},
    ),
}  # fmt: skip
"""Directives that apply to a step of the ladder by themselves."""


@cache
def ladder(kind: str) -> Mapping[str, Dag]:
    """Return the DAG at each step, for a ``dense`` or ``moe`` model of four layers."""
    base = training_dag(synthetic(f"{kind}:4", hidden=256))
    made: dict[str, Dag] = {}
    for name, program in PROGRAMS.items():
        dag = base
        for group in groups(program):
            directives = [parse_directive(data) for data in group]
            dag = type(directives[0]).rewrite(dag, [directive.check(dag, MESH) for directive in directives])
        made[name] = dag
    made["ordered"] = Program.parse([*PROGRAMS["replicated"], ORDER]).apply(base, MESH)
    return made


def groups(program: tuple[Any, ...]) -> list[list[Any]]:
    """Return runs of directives of one kind."""
    runs: list[list[Any]] = []
    for data in program:
        if runs and runs[-1][0]["op"] == data["op"]:
            runs[-1].append(data)
        else:
            runs.append([data])
    return runs


def snapshot(dag: Dag) -> tuple[Any, ...]:
    """Return all that a DAG holds, by value."""
    arrays = [getattr(dag.nodes, name).tobytes() for name in NODE_COLUMNS]
    arrays += [getattr(dag.edges, name).tobytes() for name in ("src", "dst", "role", "payload")]
    tables = [getattr(dag, name) for name in Dag.__slots__ if name not in ("nodes", "edges")]
    return (*arrays, *tables)
