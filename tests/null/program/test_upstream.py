"""Upstream Piper's programs load, compile and verify unchanged, and ours export back where they can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piper_core.arch.synthetic import synthetic
from piper_core.errors import DirectiveError
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import Axis, Collective, NodeKind, Phase, Sync
from piper_core.program.program import Program
from piper_core.program.strategy import base_dag, load, loads
from piper_core.program.upstream import to_upstream
from piper_core.schedule.compile import compile_program
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.families.base import Family

FILES = sorted((Path(__file__).parents[2] / "golden" / "upstream").glob("*.json"))
NAMES = [path.stem for path in FILES]

PLACE = {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]}
REPLICATE = {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 1], "reduce_stream": "dp_stream"}
SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}


def base(path: Path) -> Dag:
    """A mixture-of-experts model with as many PP tags as the program names, and parameters of several MiB."""
    placed = [item["filter"]["PP"] for item in json.loads(path.read_text()) if item["op"] == "place"]
    return training_dag(synthetic("moe:8", max(placed) + 1, hidden=512), sync=Sync.NONE)


def count(dag: Dag, kind: Collective, axis: Axis = Axis.DATA) -> int:
    return int(((dag.nodes.collective == kind) & (dag.nodes.axis == axis)).sum())


def claims_apart(one: Dag, other: Dag) -> bool:
    """Compare two DAGs, whatever rows an ``actions`` claims to name in full."""
    return replace(one, ordered=()).equal(replace(other, ordered=()))


def test_there_are_programs() -> None:
    assert len(FILES) >= 12


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_compiles_and_verifies_unchanged(path: Path) -> None:
    program, dag = load(path).program, base(path)
    compiled = compile_program(program, dag).dag
    assert compiled.groups
    assert dag.equal(base(path))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_exports_to_the_same_directives(path: Path) -> None:
    program, dag = load(path).program, base(path)
    data = to_upstream(program, dag)
    assert json.loads(json.dumps(data)) == data
    normal = [{("devices" if key == "device" else key): item[key] for key in item} for item in
              json.loads(path.read_text())]  # fmt: skip
    assert sorted(map(_text, data)) == sorted(map(_text, normal))
    assert Program.parse(data).apply(dag).equal(program.apply(dag))
    assert to_upstream(Program.parse(data)) == data


def _text(item: dict[str, Any]) -> str:
    return json.dumps(item, sort_keys=True)


def test_data_parallel_reduces_once_a_bucket() -> None:
    dag = load(FILES[NAMES.index("dp2")]).program.apply(training_dag(synthetic("dense:4", 1), sync=Sync.NONE))
    assert count(dag, Collective.ALL_REDUCE) == len(dag.buckets) == 1
    assert not (dag.nodes.kind == NodeKind.NORM).any()
    assert "dp_stream" in dag.streams


def test_zero_stages_of_one_layout() -> None:
    """Plain: one all_reduce a bucket; ZeRO-2 and 3: a reduce_scatter a microbatch; ZeRO-3: gathers for F and B."""
    found = {}
    for name in ("pp2_dp2_ep2", "pp2_dp2_ep2_bucket", "pp2_dp2_ep2_shard_grads", "pp2_dp2_ep2_shard_params"):
        path = FILES[NAMES.index(name)]
        dag = load(path).program.apply(base(path))
        buckets = sum(bucket.ranks > 1 for bucket in dag.buckets)
        kinds = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        found[name] = buckets, *(count(dag, kind) / buckets for kind in kinds)
        assert count(dag, Collective.ALL_TO_ALL, Axis.EXPERT) == 8 * 4 * 2 * 2  # layers, microbatches, F and B, two
    plain, small, grads, params = found.values()
    assert plain == (2, 1.0, 0.0, 0.0)
    assert small[0] > 2
    assert small[1:] == (1.0, 0.0, 0.0)
    assert grads == (2, 0.0, 4.0, 1.0)
    assert params == (small[0], 0.0, 4.0, 8.0)


def test_v_placement_keeps_the_turn_on_one_rank_group() -> None:
    """Interleaved, all three boundaries between four stages cross; in a V the middle one does not."""
    crossing = {}
    for name in ("interleaved4", "v4"):
        path = FILES[NAMES.index(name)]
        dag = load(path).program.apply(base(path))
        sends = (dag.nodes.kind == NodeKind.SEND) & (dag.nodes.phase == Phase.F)
        crossing[name] = int(sends.sum()) // dag.microbatches
    assert crossing == {"interleaved4": 3, "v4": 2}


def test_overlap_groups_and_split_backwards() -> None:
    dag = load(FILES[NAMES.index("overlap_bi_bw")]).program.apply(base(FILES[NAMES.index("overlap_bi_bw")]))
    assert len(dag.overlaps) == 3
    phases = np.unique(dag.nodes.phase[dag.compute]).tolist()
    assert phases == [Phase.F, Phase.BI, Phase.BW]
    mixed = load(FILES[NAMES.index("mixed_backward")]).program
    assert not mixed.canonical
    dag = mixed.apply(base(FILES[NAMES.index("mixed_backward")]))
    assert np.unique(dag.nodes.phase[dag.compute]).tolist() == [Phase.F, Phase.B, Phase.BI, Phase.BW]


def test_a_bare_array_has_no_clipping_and_no_batch() -> None:
    strategy = load(FILES[0])
    assert strategy.header.sync is Sync.NONE
    dag = base_dag(strategy, synthetic="dense:8", stages=2)
    assert (dag.global_batch, dag.sync, dag.stages) == (None, Sync.NONE, 2)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dualpipe"])  # it places by microbatch
def test_families_export(name: str) -> None:
    """What a family orders by ``actions`` exports as one list of filters a row, and means the same."""
    program = _family(FAMILIES[name])
    stages = 1 + max(item["filter"]["PP"] for item in program.to_data() if item["op"] == "place")
    dag = training_dag(synthetic("dense:8", stages))
    data = to_upstream(program, dag)
    assert [item["op"] for item in data[-2:]] == ["order", "order"]
    again = Program.parse(data)
    assert claims_apart(again.apply(dag), program.apply(dag))
    assert compile_program(again, dag).plan.grid() == compile_program(program, dag).plan.grid()


def _family(family: Family) -> Program:
    """A program of two rows in the family's order."""
    p, m, v = 2, 4, family.virtual_stages(2)[0]
    rows = family.grid(p, m, v).rows
    row_of = {action.stage: row for row, slots in enumerate(rows) for slot in slots for action in slot}
    return Program.parse(
        [
            *({"op": "place", "filter": {"PP": stage}, "devices": [row_of[stage]]} for stage in sorted(row_of)),
            {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m},
            {"op": "order", "actions": {str(row): format_slots(tuple(slots)) for row, slots in enumerate(rows)}},
        ]
    )


def test_one_stage_without_a_tag() -> None:
    """A model without PP has no stage to name, and a program without split no microbatch."""
    program = Program.parse([{"op": "order", "actions": {"0": "0F0 0BI0 0BW0"}}])
    dag = training_dag(synthetic("dense:2"))
    data = to_upstream(program, dag)
    assert data == [{"op": "order", "filters": [[{"PASS": "F"}], [{"PASS": "BI"}], [{"PASS": "BW"}]]}]
    assert claims_apart(Program.parse(data).apply(dag), program.apply(dag))


@pytest.mark.parametrize(
    ("directive", "field"),
    [
        ({"op": "stage", "stages": 2}, "op"),
        ({"op": "recompute", "filter": {}, "policy": "full"}, "op"),
        ({"op": "shard", "filter": {"PP": 0}, "devices": [0, 1], "kind": "tensor"}, "kind"),
        ({"op": "shard", "filter": {"PP": 0}, "devices": [0, 1], "kind": "sequence"}, "kind"),
        ({"op": "shard", "filter": {"EP": "*"}, "axis": "ep"}, "axis"),
        ({"op": "shard", "filter": {"EP": "*"}, "devices": [[0, 1], [2, 3]]}, "devices"),
        ({"op": "shard", "filter": {"EP": "*"}, "devices": [0, 1], "regather": False}, "regather"),
        ({"op": "shard", "filter": {"REGION": "expert"}, "devices": [0, 1]}, "filter"),
        ({**REPLICATE, "devices": [[0, 1], [2, 3]]}, "devices"),
        ({**REPLICATE, "shard_optimizer": True}, "shard_optimizer"),
        ({**REPLICATE, "prefetch": 2}, "prefetch"),
        ({"op": "replicate", "filter": {}, "axis": "dp"}, "axis"),
        ({**PLACE, "filter": {"PP": [0, 1]}}, "filter"),
        ({**PLACE, "filter": {"PP": "0-3"}}, "filter"),
        ({**PLACE, "filter": {"LAYER": 0}}, "filter"),
        ({**PLACE, "filter": {"PP": 0, "MB": 0}}, "filter"),
        ({"op": "order", "filters": [[{"PASS": ["F", "B"]}], [{"PASS": "BW"}]]}, "filters"),
        ({"op": "order", "filters": [[{"PASS": "R"}], [{"PASS": "BI"}]]}, "filters"),
        ({"op": "order", "filters": [[{"COMM": "send"}], [{"PASS": "B"}]]}, "filters"),
        ({"op": "order", "actions": {"0": "0F0"}}, "actions"),
        ({"op": "order", "actions": {"0": "0F0 0R0 0B0"}}, "actions"),
    ],
    ids=lambda value: value["op"] if isinstance(value, dict) else value,
)
def test_an_extension_stops_the_export(directive: dict[str, Any], field: str) -> None:
    program = Program.parse([PLACE, SPLIT, directive])
    with pytest.raises(DirectiveError) as caught:
        to_upstream(program)
    line = str(caught.value)
    assert line.startswith(f"directive 3 of 3, {directive['op']}(")
    assert f"upstream Piper has no such {field}, found " in line
    assert "\n" not in line


def test_a_filter_on_microbatches_needs_a_split() -> None:
    order = {"op": "order", "filters": [[{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "B"}]]}
    with pytest.raises(DirectiveError, match="tag MB; upstream has it in order alone, after a split"):
        to_upstream(Program.parse([PLACE, order]))
    assert to_upstream(Program.parse([order, SPLIT, PLACE])) == [PLACE, SPLIT, order]


def test_other_forms_of_a_filter() -> None:
    text = '[{"op": "place", "filter": {"PP": 0, "EP": null, "TP": "*"}, "devices": [0]}]'
    program = loads(text).program
    assert program.to_data()[0]["filter"] == {"PP": 0, "EP": "-", "TP": "*"}
    assert to_upstream(program) == json.loads(text)
