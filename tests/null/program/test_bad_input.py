"""Whatever is wrong with a program, one line says what, where, what was expected; nothing is changed."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_core.arch.synthetic import synthetic
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, training_dag
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy
from tests.null.program.helpers import stopped_at_most

MESH = Mesh.parse("pp=2,dp=4")


@cache
def model(name: str) -> Dag:
    """Base DAGs: ``plain`` 30 layers without tags, ``staged`` two stages, ``moe`` two with experts, ``batch`` of 12."""
    match name:
        case "plain":
            return training_dag(synthetic("dense:30"))
        case "staged":
            return training_dag(synthetic("dense:8", 2))
        case "moe":
            return training_dag(synthetic("moe:8", 2))
        case _:
            return training_dag(synthetic("dense:8", 2), global_batch=12)


def place(stage: Any, *devices: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "place", "filter": {"PP": stage}, "devices": list(devices), **fields}


def split(m: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m, **fields}


def replicate(*devices: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "replicate", "filter": {}, "devices": list(devices), **fields}


def shard(kind: str, *devices: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "shard", "filter": {}, "devices": list(devices), "kind": kind, **fields}


def order(*groups: Any) -> dict[str, Any]:
    """``order("0F0", "0F1 1B0")``: groups of filters, from actions."""
    read = re.compile(r"(\d+)([A-Z]+)(\d+)")
    return {"op": "order", "filters": [
        [{"PP": int(s), "MB": int(m), "PASS": phase} for s, phase, m in read.findall(group)] for group in groups
    ]}  # fmt: skip


def rows(*texts: Any) -> dict[str, Any]:
    return {"op": "order", "actions": {str(row): text for row, text in enumerate(texts)}}


@dataclass(frozen=True)
class Bad:
    """A program, words of its error, and the number of the directive at fault (0: of none)."""

    program: Any
    words: str
    at: int = 1
    model: str = "staged"


TWO = [place(0, 0), place(1, 1), split(2)]
EIGHT = [place(0, 0, 1, 2, 3), place(1, 4, 5, 6, 7)]
GOOD_ROW = "1F0 1B0 1F1 1B1"

# What cannot be read as directives.
MALFORMED = {
    "program is a mapping": Bad({"op": "stage"}, "a program is not a list of directives", 0),
    "program is a text": Bad("stage", "a program is not a list of directives", 0),
    "directive is a number": Bad([5], "a directive is not an object"),
    "directive is null": Bad([place(0, 0), None], "a directive is not an object", 2),
    "directive is a list": Bad([[place(0, 0)]], "a directive is not an object"),
    "no op": Bad([{"filter": {}}], "unknown op None, expected one of stage, split, place"),
    "wrong op": Bad([{"op": "plaice", "filter": {}, "devices": [0]}], "unknown op 'plaice', expected one of"),
    "op nearly right": Bad([{"op": "splt", "filter": {}}], "recompute, order; did you mean split?"),
    "op is a list": Bad([{"op": ["place"]}], "unknown op ['place']"),
    "missing filter": Bad([{"op": "place", "devices": [0]}], "field 'filter' is missing"),
    "missing devices": Bad([{"op": "place", "filter": {}}], "field 'devices' is missing"),
    "missing microbatches": Bad([{"op": "split", "filter": {}, "dim_name": "MB"}], "'num_microbatches' is missing"),
    "missing policy": Bad([{"op": "recompute", "filter": {}}], "field 'policy' is missing"),
    "empty order": Bad([{"op": "order"}], "field 'filters' is missing"),
    "unknown field": Bad([place(0, 0, steam="s")], "unknown field 'steam', expected one of filter, devices, stream"),
    "actions and filters": Bad([{**rows("0F0 0B0"), "filters": []}], "unknown field 'filters'"),
    "filter is a list": Bad([{"op": "place", "filter": [0], "devices": [0]}], "filter is not an object"),
    "filter value true": Bad([place(True, 0)], "filter value of PP has the wrong type"),
    "filter value 0.0": Bad([place(0.0, 0)], "filter value of PP has the wrong type"),
    "filter value nested": Bad([{"op": "place", "filter": {"PP": {"PP": 0}}, "devices": [0]}], "wrong form"),
    "filter value a word": Bad([place("first", 0)], "filter value of PP has the wrong form"),
    "filter range backwards": Bad([place("3-1", 0)], "filter value of PP has the wrong form"),
    "filter list empty": Bad([{"op": "place", "filter": {"PP": []}, "devices": [0]}], "filter value of PP"),
    "unknown PASS": Bad([{"op": "order", "filters": [[{"PASS": "X"}], [{"PASS": "B"}]]}], "unknown PASS 'X'"),
    "unknown REGION": Bad([{"op": "recompute", "filter": {"REGION": "mlpp"}, "policy": "full"}], "unknown REGION"),
    "devices null": Bad([place(0) | {"devices": None}], "devices is not a list of ranks"),
    "devices empty": Bad([place(0)], "devices is not a list of ranks"),
    "devices an int": Bad([place(0) | {"devices": 0}], "devices is not a list of ranks"),
    "devices texts": Bad([place(0, "0", "1")], "devices has the wrong type, expected a list of integers"),
    "devices true": Bad([place(0, True)], "devices has the wrong type, expected a list of integers"),
    "devices 1.0": Bad([place(0, 0, 1.0)], "devices has the wrong type, expected a list of integers"),
    "devices negative": Bad([place(0, 0, -1)], "devices holds a rank out of range, expected ranks >= 0"),
    "devices repeated": Bad([place(0, 0, 1, 0)], "rank 0 is named twice"),
    "devices mixed": Bad([replicate([0, 1], 2)], "devices"),
    "groups overlap": Bad([replicate([0, 1], [1, 2])], "overlapping groups: rank 1 is named twice"),
    "groups unequal": Bad([replicate([0, 1], [2])], "unequal groups, expected groups of one size, found 1, 2 ranks"),
    "place on groups": Bad([place(0, [0], [1])], "place takes one group of devices"),
    "stream a number": Bad([place(0, 0, stream=3)], "stream has the wrong type, expected a short text, found 3"),
    "no microbatches": Bad([split(0)], "num_microbatches is out of range, expected an integer >= 1, found 0"),
    "negative microbatches": Bad([split(-4)], "num_microbatches is out of range"),
    "true microbatches": Bad([split(True)], "num_microbatches is out of range"),
    "2.0 microbatches": Bad([split(2.0)], "num_microbatches is out of range"),
    "too many microbatches": Bad([split(10**30)], "num_microbatches is out of range"),
    "dim_name a list": Bad([split(2, dim_name=["MB"])], "dim_name has the wrong type"),
    "flag a word": Bad([replicate(0, 1, shard_grads="yes")], "shard_grads has the wrong type, expected true or false"),
    "flag a number": Bad([replicate(0, 1, shard_params=1)], "shard_params has the wrong type"),
    "bucket of nothing": Bad([replicate(0, 1, bucket_size=0)], "bucket_size is out of range"),
    "prefetch negative": Bad([replicate(0, 1, prefetch=-1)], "prefetch is out of range"),
    "unknown kind": Bad([shard("tensors", 0, 1)], "unknown kind 'tensors', expected one of expert, tensor"),
    "unknown method": Bad([shard("context", 0, 1, method="star")], "expected ring or all_to_all"),
    "method of tensor": Bad([shard("tensor", 0, 1, method="ring")], "method is for kind context"),
    "regather a word": Bad([shard("sequence", 0, 1, regather="no")], "regather has the wrong type"),
    "unknown policy": Bad([{"op": "recompute", "filter": {}, "policy": "some"}], "expected full or selective"),
    "stage of nothing": Bad([{"op": "stage"}], "stage takes one of cuts, layers_per_stage, stages, found none"),
    "stage twofold": Bad([{"op": "stage", "cuts": [1], "stages": 2}], "stage takes one of"),
    "cuts a text": Bad([{"op": "stage", "cuts": "9"}], "cuts has the wrong type"),
    "one group": Bad([order("0F0")], "filters is too short, expected two or more groups"),
    "empty group": Bad([order("0F0", "")], "group 1 of filters is not a list of filters"),
    "filters an object": Bad([{"op": "order", "filters": {"PP": 0}}], "filters is too short"),
    "actions a list": Bad([{"op": "order", "actions": ["0F0"]}], "actions is not a mapping"),
    "actions empty": Bad([{"op": "order", "actions": {}}], "actions is not a mapping"),
    "row a word": Bad([{"op": "order", "actions": {"first": "0F0"}}], "actions row 'first' is not a row number"),
    "row negative": Bad([{"op": "order", "actions": {"-1": "0F0"}}], "actions row '-1' is not a row number"),
    "row twice": Bad([{"op": "order", "actions": {"0": "0F0 0B0", "00": "0F0 0B0"}}], "actions names a row twice"),
    "row of numbers": Bad([rows([0, 1])], "actions of row 0 is not a text"),
    "row empty": Bad([rows("")], "actions of row 0 is empty"),
    "row of nonsense": Bad([rows("0F0 0X1")], "cannot read action '0X1', expected stage, verb and microbatch"),
    "row unbalanced": Bad([rows("0F0 (0F1 0B0")], "unbalanced parentheses"),
    "row with a message": Bad([rows("0F0 0SEND_F0 0B0")], "row 0 names 0SEND_F0, expected compute such as"),
}  # fmt: skip

# What can be read but does not apply.
ILLEGAL = {
    "layers that do not add up": Bad([{"op": "stage", "layers_per_stage": [7, 7, 7, 7]}],
                                     "layers_per_stage adds up to 28 of 30 layers", model="plain"),
    "an empty stage": Bad([{"op": "stage", "layers_per_stage": [15, 0, 15]}], "has an empty stage", model="plain"),
    "more stages than layers": Bad([{"op": "stage", "stages": 31}], "31 stages of 30 layers", model="plain"),
    "cuts that fall": Bad([{"op": "stage", "cuts": [20, 10]}], "cuts are not increasing", model="plain"),
    "a cut past the end": Bad([{"op": "stage", "cuts": [30]}], "within 1-29", model="plain"),
    "stages of a staged model": Bad([{"op": "stage", "stages": 2}], "the model already carries PP tags"),
    "two stage directives": Bad([{"op": "stage", "stages": 2}, {"op": "stage", "stages": 3}], "two stage", 2, "plain"),
    "stages not contiguous": Bad([{"op": "place", "filter": {"LAYER": "0-3"}, "devices": [0]}], "not placed", 0),
    "unknown tag": Bad([{"op": "place", "filter": {"PQ": 0}, "devices": [0]}], "unknown tag 'PQ' in filter {PQ: 0}"),
    "PP without stages": Bad([place(1, 0)], "matches nothing; PP is 0-0", model="plain"),
    "MB on a whole batch": Bad([{"op": "split", "filter": {"MB": 0}, "dim_name": "MB", "num_microbatches": 2}],
                               "add a split directive"),
    "filter that matches nothing": Bad([place(0, 0), place(7, 1)], "filter {PP: 7} matches nothing; PP is 0-1", 2),
    "PASS on a place": Bad([{"op": "place", "filter": {"PASS": "F"}, "devices": [0]}], "place filter names PASS"),
    "split twice": Bad([*TWO, split(2)], "two split directives", 4),
    "split of a part": Bad([{**split(2), "filter": {"PP": 0}}], "compute nodes unsplit, expected all compute; use {}"),
    "split by a taken name": Bad([split(2, dim_name="PP")], "dim_name 'PP' is taken"),
    "batch that does not divide": Bad([split(5)], "global batch 12 does not divide into 5 microbatches; use 4 or 6",
                                      model="batch"),
    "batch and replicas": Bad([*EIGHT, split(4), replicate([0, 1, 2, 3], [4, 5, 6, 7])],
                              "global batch 12 does not divide into 4 replicas x 4 microbatches", 4, "batch"),
    "too many nodes": Bad([split(10**7)], "10000000 microbatches"),
    "stage not placed": Bad([place(0, 0)], "compute nodes are not placed, first L4.attention of stage 1", 0),
    "placed twice": Bad([place(0, 0), place(1, 1), place("*", 2)], "expected each node placed once", 3),
    "placements unequal": Bad([place(0, 0, 1), place(1, 2)], "unequal groups: [0, 1] and [2]", 2),
    "placements overlap": Bad([place(0, 0, 1), place(1, 1, 2)], "[0, 1] and [1, 2] share rank 1", 2),
    "placed in another order": Bad([place(0, 0, 1), place(1, 1, 0)], "overlapping groups", 2),
    "rank outside the mesh": Bad([place(0, 0), place(1, 8)], "rank 8 is out of range, expected 0-7 (mesh", 2),
    "replicate without place": Bad([replicate(0, 1)], "rank 1 does not hold what {} matches"),
    "replicate leaves out a rank": Bad([*EIGHT, replicate([0, 1, 2], [4, 5, 6])], "leave out rank 3 of row", 3),
    "replicate in unequal parts": Bad([*EIGHT, replicate([0, 1, 2, 4], [3, 5, 6, 7])], "in unequal parts", 3),
    "replicate elsewhere": Bad([place("*", 0, 1), replicate([0, 1], [2, 3])], "rank 2 does not hold what", 2),
    "replicate twice": Bad([place("*", 0, 1), replicate(0, 1), replicate(0, 1)], "replicates compute twice", 3),
    "parameters without gradients": Bad([place("*", 0, 1), replicate(0, 1, shard_params=True)],
                                        "shard_params without shard_grads, expected ZeRO-3 shards both", 2),
    "unknown axis": Bad([*EIGHT, {"op": "replicate", "filter": {}, "axis": "ddp"}], "expected one of pp, dp", 3),
    "experts of attention": Bad([place("*", 0, 1), shard("expert", 0, 1)], "which cannot be sharded by expert",
                                2, "moe"),
    "experts of a dense model": Bad([place("*", 0, 1), {**shard("expert", 0, 1), "filter": {"EP": "*"}}],
                                    "unknown tag 'EP'", 2),
    "degree of experts": Bad([place("*", 0, 1, 2), {**shard("expert", 0, 1, 2), "filter": {"EP": "*"}}],
                             "expert degree 3 does not divide the model, expected one of 1, 2, 4, 8", 2, "moe"),
    "degree of heads": Bad([place("*", 0, 1, 2), shard("tensor", 0, 1, 2)], "tensor degree 3 does not divide", 2),
    "shard across rows": Bad([place(0, 0, 1), place(1, 2, 3), shard("tensor", [0, 2], [1, 3])], "partly in row", 3),
    "sharded twice": Bad([place("*", 0, 1), shard("tensor", 0, 1), shard("tensor", 0, 1)], "each chunk once", 3),
    "no grid": Bad([*EIGHT, shard("tensor", [0, 1], [2, 3], [4, 5], [6, 7]), replicate([0, 1, 2, 3], [4, 5, 6, 7])],
                   "expected groups that form a product", 4),
    "recompute of nothing": Bad([{"op": "recompute", "filter": {"LAYER": -1}, "policy": "full"}], "matches no layer"),
    "recomputed twice": Bad([{"op": "recompute", "filter": {"PP": 0}, "policy": "full"},
                             {"op": "recompute", "filter": {"LAYER": 0}, "policy": "selective"}], "each chunk once", 2),
    "backward before forward": Bad([*TWO, order("0B0", "0F0")], "cyclic order: ", 4),
    "orders in a circle": Bad([*TWO, order("0F0", "0F1"), order("0F1", "0F0")], "cyclic order: ", 5),
    "rows that wait for each other": Bad([*TWO, order("0F1", "0F0"), order("1F0", "1F1"), order("1B0", "0B0"),
                                          order("0B0", "0F1")], "order", 6),
    "the same group twice": Bad([*TWO, order("0F0", "0F0")], "0F0 is in two consecutive groups", 4),
    "order of another microbatch": Bad([*TWO, order("0F0", "0F2")], "matches nothing; PP is 0-1; MB is 0-1", 4),
    "B and BW of one chunk": Bad([*TWO, order("0F0", "0BI0", "0BW0", "0B0")], "never both", 4),
    "a row that misses an action": Bad([*TWO, rows("0F0 0F1 0B0", GOOD_ROW)], "row 0 misses 0B1", 4),
    "a row that doubles an action": Bad([*TWO, rows("0F0 0F1 0B0 0F0 0B1", GOOD_ROW)], "row 0 names 0F0 twice", 4),
    "a row with another's action": Bad([*TWO, rows("0F0 1F0")], "row 0 names 1F0, which is on row 1", 4),
    "a row with a stage too many": Bad([*TWO, rows("0F0 2F0")], "which does not exist: stages are 0-1", 4),
    "a row with a microbatch too many": Bad([*TWO, rows("0F2")], "which does not exist: microbatches are 0-1", 4),
    "a row with B and BW": Bad([*TWO, rows("0F0 0F1 0BI0 0BW0 0B0 0B1", GOOD_ROW)], "never both", 4),
    "a row with R": Bad([*TWO, rows("0F0 0F1 0R0 0B0 0B1", GOOD_ROW)], "no recompute directive covers it", 4),
    "a row backwards": Bad([*TWO, rows("0B0 0F0 0F1 0B1", GOOD_ROW)], "cyclic order: row 0 puts 0B0 before 0F0", 4),
    "an overlap with itself": Bad([*TWO, rows("(0F0 0B0) 0F1 0B1", GOOD_ROW)], "cyclic order", 4),
    "a row too many": Bad([*TWO, {"op": "order", "actions": {"2": "0F0 0B0"}}], "row 2 does not exist", 4),
    "a row claimed twice": Bad([*TWO, rows("0F0 0F1 0B0 0B1"), rows("0F0 0F1 0B1 0B0")], "claim row 0", 5),
}  # fmt: skip

CASES = MALFORMED | ILLEGAL


def test_there_are_cases() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_program_says_what_and_where(case: Bad) -> None:
    dag, given_ = model(case.model), copy.deepcopy(case.program)
    before = copy.deepcopy(dag)
    with pytest.raises(DirectiveError) as caught:
        Program.parse(case.program).apply(dag, MESH)
    line = str(caught.value)
    assert case.words in line
    assert "\n" not in line
    assert len(line) < 600
    if case.at:
        op = case.program[case.at - 1].get("op") if isinstance(case.program[case.at - 1], dict) else None
        start = f"directive {case.at} of {len(case.program)}, " + (f"{op}(" if isinstance(op, str) else "")
        assert line.startswith(start), line
    else:
        assert not line.startswith("directive "), line
    assert dag.equal(before)
    assert dag.notes == before.notes
    assert case.program == given_


def test_malformed_programs_fail_before_a_model_is_needed() -> None:
    for case in MALFORMED.values():
        with pytest.raises(DirectiveError):
            Program.parse(case.program)
    for case in ILLEGAL.values():
        Program.parse(case.program)


def test_stages_keep_every_layer() -> None:
    """30 layers on 4 stages are 30 layers, uneven, never 28."""
    dag = Program.parse([{"op": "stage", "stages": 4}, *(place(s, s) for s in range(4))]).apply(model("plain"))
    layers = [chunk.layer for chunk in dag.chunks]
    held = [{layers[c] for c in dag.nodes.chunk[dag.compute & (dag.nodes.stage == s)]} for s in range(4)]
    assert sorted(layer for stage in held for layer in stage if 0 <= layer < 30) == list(range(30))
    assert {len([layer for layer in stage if 0 <= layer < 30]) for stage in held} == {7, 8}


def test_stages_must_follow_the_model() -> None:
    """PP tags of an annotated model that jump back are refused."""
    from dataclasses import replace

    table = synthetic("dense:3", 3)
    swapped = {0: 1, 1: 0, 2: 2}
    chunks = tuple(replace(chunk, tags=tuple((tag, swapped[stage]) for tag, stage in chunk.tags))
                   for chunk in table.chunks)  # fmt: skip
    dag = training_dag(replace(table, chunks=chunks))
    with pytest.raises(DirectiveError, match=r"stages are not contiguous: L0\.\w+ of stage 1 feeds L1\.\w+ of stage 0"):
        Program.parse([place(s, s) for s in range(3)]).apply(dag)


def test_a_long_program_fails_as_quickly() -> None:
    data = [place("*", 0) for _ in range(2000)] + [place(0, 1)]
    start = time.perf_counter()
    with pytest.raises(DirectiveError, match="directive 2001 of 2001"):
        Program.parse(data).apply(model("staged"))
    with pytest.raises(DirectiveError, match="a program of 100001 directives"):
        Program.parse([None] * 100_001)
    assert time.perf_counter() - start < 10


# --- anything at all ---

WORDS = st.sampled_from(
    ["", "*", "-", "0-3", "3-0", "1-999999999", "PP", "EP", "LAYER", "F", "B", "BI", "BW", "R", "mlp", "expert",
     "tensor", "context", "sequence", "full", "selective", "ring", "all_to_all", "dp", "pp", "send", "0F0", "0F0 0B0",
     "0F0 (0F1 0B0) 0B1", "(", "\u0663", "\u00b2", "9" * 12, "\ud800", "a\nb"]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | WORDS | st.text(max_size=5)
FIELDS = st.sampled_from(
    ["op", "filter", "devices", "device", "stream", "cuts", "layers_per_stage", "stages", "dim_name", "kind", "axis",
     "num_microbatches", "method", "regather", "reduce_stream", "gather_stream", "bucket_size", "shard_grads",
     "shard_params", "shard_optimizer", "prefetch", "policy", "filters", "actions", "PP", "MB", "LAYER", "EP", "0", "1"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)
SAMPLES: list[dict[str, Any]] = [
    {"op": "stage", "stages": 2}, place(0, 0, 1), place(1, 2, 3), place("*", 0, 1, stream="pp_stream"), split(2),
    {"op": "stage", "layers_per_stage": [15, 15]}, {**shard("expert", [0, 1], [2, 3]), "filter": {"EP": "*"}},
    shard("tensor", [0, 1], [2, 3]), {"op": "shard", "filter": {}, "axis": "dp", "kind": "context", "method": "ring"},
    replicate([0, 1], [2, 3], shard_grads=True, shard_params=True, bucket_size=1, prefetch=2), order("0F0", "0F1"),
    {"op": "recompute", "filter": {"LAYER": "0-3"}, "policy": "full"}, order("1F0", "1BI0", "1F1 1BW0"),
    rows("0F0 0F1 0B0 0B1", "1F0 1BI0 (1F1 1BW0) 1B1"),
]  # fmt: skip


@st.composite
def directives(draw: st.DrawFn) -> Any:
    """A directive, mostly with one thing wrong."""
    data: Any = copy.deepcopy(draw(st.sampled_from(SAMPLES)))
    at, path = data, draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    for step in path:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = keys[step % len(keys)]
        if not isinstance(at[key], dict | list) or step == path[-1]:
            match draw(st.integers(0, 4)):
                case 0:
                    at[key] = draw(VALUES)
                case 1:
                    del at[key]
                case 2 if isinstance(at, list):
                    at.append(draw(VALUES))
                case 2:
                    at[draw(FIELDS)] = draw(VALUES)
                case _:
                    pass
            break
        at = at[key]
    return data


def run(data: Any, dag: Dag) -> None:
    Strategy.parse(data).program.apply(dag, MESH)


def applies_or_is_refused(data: Any) -> None:
    """Apply a program to every model; none may change, and none may take long."""
    start = time.perf_counter()
    for name in ("staged", "moe", "batch", "plain"):
        dag = model(name)
        sizes = len(dag), len(dag.edges), len(dag.states), len(dag.groups)
        stopped_at_most(run, data, dag)
        assert sizes == (len(dag), len(dag.edges), len(dag.states), len(dag.groups))
    assert time.perf_counter() - start < 10


@settings(max_examples=300)
@given(VALUES | st.lists(st.dictionaries(FIELDS, VALUES, max_size=5), max_size=4))
def test_any_data_is_refused_in_one_line(data: Any) -> None:
    applies_or_is_refused(data)


@settings(max_examples=600)
@given(st.lists(directives(), max_size=6))
def test_any_mistake_is_refused_in_one_line(data: Any) -> None:
    applies_or_is_refused(data)
