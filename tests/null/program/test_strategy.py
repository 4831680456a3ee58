"""The strategy file: what is written is what is read, and what is read is written for a person."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_core.directives import Order, parse_directive
from piper_core.errors import ConfigError, PiperError, ProgramError
from piper_core.mesh import Mesh
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.program.read import read_document
from piper_core.program.strategy import Header, Strategy, base_dag, dump, load, loads
from piper_core.program.write import describe, to_json
from piper_core.schedule.families import get_family

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=12,
)  # fmt: skip
FREE = st.dictionaries(st.text(max_size=20), JSON, max_size=4)
COUNT = st.none() | st.integers(1, 2**20)
NAME = st.none() | st.text(min_size=1, max_size=30).filter(str.strip)
DIRECTIVES = [
    {"op": "stage", "stages": 4},
    {"op": "stage", "cuts": [3, 9]},
    {"op": "stage", "layers_per_stage": [2, 3, 3]},
    {"op": "split", "filter": {}, "dim_name": "micro batch: #1", "num_microbatches": 4},
    {"op": "place", "filter": {"PP": 0, "MB": "0-3"}, "devices": [0, 1], "stream": "pp_stream"},
    {"op": "place", "filter": {"EP": "-", "LAYER": "*", "no": [1, 2], "5": 3}, "devices": [2]},
    {"op": "shard", "filter": {"REGION": "expert"}, "devices": [[0, 1], [2, 3]], "stream": "- x"},
    {"op": "shard", "filter": {}, "axis": "cp", "kind": "context", "method": "all_to_all"},
    {"op": "shard", "filter": {}, "axis": "tp", "kind": "sequence", "regather": False},
    {"op": "replicate", "filter": {"PP": "*"}, "devices": [0, 1], "shard_optimizer": True, "prefetch": 0},
    {"op": "replicate", "filter": {}, "axis": "dp", "bucket_size": 25, "shard_grads": True, "shard_params": True},
    {"op": "recompute", "filter": {"LAYER": [0, 1]}, "policy": "selective"},
    {"op": "order", "filters": [[{"PP": 0, "PASS": "F"}], [{"PASS": ["B", "BI"]}, {"COMM": "send"}]]},
    {"op": "order", "actions": {"0": "0F0 (0F1 0BI0) 0BW0 0B1", "3": "1F0"}},
]


def llama() -> Strategy:
    """Four pipeline rows of eight GPUs, interleaved."""
    mesh = Mesh.parse("pp=4,dp=2,tp=4")
    header = Header(
        model="llama9b", cluster="p4de", mesh=mesh, gpus=32, global_batch=64, seq_len=4096, micro_batch=4,
        schedule="interleaved_1f1b", predicted={"step_time_s": 1.5, "row_bytes": (3, 4)}, versions={"piper": "0.1"},
    )  # fmt: skip
    rows = mesh.groups("dp", "tp")
    data: list[dict[str, Any]] = [
        {"op": "stage", "layers_per_stage": [5, 5, 5, 5, 4, 4, 4, 4]},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 8},
        *({"op": "place", "filter": {"PP": s}, "devices": list(rows[s % 4])} for s in range(8)),
        {"op": "shard", "filter": {"LAYER": "*"}, "axis": "tp", "kind": "sequence"},
        {"op": "replicate", "filter": {}, "axis": "dp", "shard_optimizer": True, "bucket_size": 25},
        {"op": "recompute", "filter": {"LAYER": "0-3"}, "policy": "full"},
    ]
    order = Order(actions=tuple(enumerate(get_family("interleaved_1f1b").grid(4, 8, 2).rows)))
    return Strategy(header, Program((*Program.parse(data).directives, order)))


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Any header over any directives."""
    mesh = draw(st.none() | st.dictionaries(st.sampled_from(["pp", "dp", "tp"]), st.integers(1, 64), min_size=1))
    header = Header(
        draw(NAME), draw(NAME), Mesh(tuple(mesh.items())) if mesh else None, None if mesh else draw(COUNT), draw(COUNT),
        draw(COUNT), draw(COUNT), draw(st.sampled_from(Sync)), draw(st.sampled_from(["token", "microbatch"])),
        draw(NAME), draw(FREE), draw(FREE), draw(FREE),
    )  # fmt: skip
    return Strategy(header, Program.parse(draw(st.lists(st.sampled_from(DIRECTIVES), max_size=5))))


@given(strategies())
def test_text_reads_back(strategy: Strategy) -> None:
    for comments in (True, False):
        assert loads(strategy.to_text(comments=comments)) == strategy
    text = to_json(strategy.header.to_data(), strategy.program.directives)
    assert json.loads(text) == strategy.to_data()
    assert loads(text) == strategy
    assert Strategy.parse(strategy.to_data()) == strategy


@given(FREE)
def test_yaml_is_read_as_it_is_written(data: dict[str, Any]) -> None:
    """Every text, number and nesting of JSON survives our YAML."""
    assert dict(loads(Strategy(Header(predicted=data), Program(())).to_text()).header.predicted) == data


@pytest.mark.parametrize("name", ["best.strategy.yaml", "best.strategy.json", "best"])
def test_file_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("of an earlier run")
    dump(llama(), path)
    assert load(path) == llama()
    assert load(str(path)) == llama()
    assert (path.read_text()[0] == "{") == name.endswith("json")
    assert os.listdir(tmp_path) == [name]


def test_the_file_is_written_for_a_person(golden: Any) -> None:
    text = llama().to_text()
    golden("strategy/llama9b.yaml", text)
    lines = text.splitlines()
    order = lines[lines.index("    actions:") + 1 :]
    assert [line.split(":")[0].strip() for line in order] == ["0", "1", "2", "3"]
    assert "  # 8 pipeline stages of 4 to 5 layers" in lines
    assert "#" not in llama().to_text(comments=False)


@pytest.mark.parametrize(
    ("directives", "words"),
    [
        ([{"op": "stage", "layers_per_stage": [9, 9, 9, 9]}], "4 pipeline stages of 9 layers"),
        ([{"op": "stage", "cuts": [9]}], "2 pipeline stages, cut before the layers named"),
        ([{"op": "stage", "stages": 1}], "1 pipeline stage, the heaviest as light as can be"),
        ([{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 1}], "1 microbatch"),
        ([{"op": "place", "filter": {"PP": s}, "devices": [s % 2]} for s in range(4)], "2 pipeline rows of 1 rank"),
        ([DIRECTIVES[7]], "sharded: context over axis cp"),
        ([DIRECTIVES[6], DIRECTIVES[8]], "sharded: expert over 2 ranks (1x); sequence over axis tp (1x)"),
        ([DIRECTIVES[10]], "data parallel: axis dp, ZeRO-3, buckets of 25 MiB"),
        ([DIRECTIVES[9]] * 2, "data parallel: 2 replicas, ZeRO-1"),
        ([DIRECTIVES[11]], "recompute: selective"),
        ([DIRECTIVES[12]], "what runs before what; groups of several may overlap"),
    ],
)
def test_comments(directives: list[dict[str, Any]], words: str) -> None:
    assert describe([parse_directive(item) for item in directives]) == words


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "a.yaml", tmp_path / "a\0b.yaml", tmp_path):
        with pytest.raises(ProgramError, match="cannot write the file"):
            dump(llama(), path)
    assert os.listdir(tmp_path) == []


def test_header_defaults_and_forms() -> None:
    strategy = loads("model: dense:24\nmesh: {pp: 2, dp: 4}\ndirectives: []\n")
    assert strategy.header == Header(model="dense:24", mesh=Mesh((("pp", 2), ("dp", 4))))
    assert strategy.header.sync is Sync.GLOBAL_NORM
    assert strategy.header.world == strategy.header.mesh
    assert loads("gpus: 8\ndirectives: []").header.world == Mesh((("rank", 8),))
    assert loads("{directives: [], model: null}").header.world is None
    assert loads("[]") == Strategy(Header(sync=Sync.NONE), Program(()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: llama9b\ndirectives: []", "unknown header field 'modle', expected one of model,"),
        ("modle: llama9b\ndirectives: []", "did you mean model?"),
        ("directive: []", "did you mean directives?"),
        ("model: llama9b", "field 'directives' is missing"),
        ("model: 5\ndirectives: []", "header field model does not do, expected a short text, found 5"),
        ("model: ''\ndirectives: []", "header field model does not do"),
        ("mesh: pp=0\ndirectives: []", "mesh needs distinct axes of size 1 or more"),
        ("mesh: pp:4\ndirectives: []", "mesh must read like pp=4,dp=2,tp=4, found 'pp:4'"),
        ("mesh: [4, 2]\ndirectives: []", "header field mesh does not do, expected axis sizes such as pp=4,dp=2"),
        ("mesh: {pp: 2.0}\ndirectives: []", "header field mesh does not do"),
        ("mesh: {}\ndirectives: []", "mesh must read like"),
        ("mesh: pp=4096,dp=4096\ndirectives: []", "expected at most 1048576 GPUs"),
        ("mesh: pp=4\ngpus: 8\ndirectives: []", "header field gpus does not do, expected 4, the size of mesh pp=4"),
        ("gpus: 0\ndirectives: []", "header field gpus does not do, expected an integer >= 1, found 0"),
        ("global_batch: true\ndirectives: []", "header field global_batch does not do"),
        ("seq_len: 4096.0\ndirectives: []", "header field seq_len does not do"),
        ("micro_batch: '4'\ndirectives: []", "header field micro_batch does not do"),
        ("sync: sometimes\ndirectives: []", "expected one of global_norm, none, post_validation, found 'sometimes'"),
        ("sync: [none]\ndirectives: []", "header field sync does not do"),
        ("reduction: mean\ndirectives: []", "expected token or microbatch, found 'mean'"),
        ("predicted: 5\ndirectives: []", "header field predicted does not do, expected a mapping, found 5"),
    ],
)
def test_header_rejects(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProgramError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("inf"), {1: 2}, {"a": object()}, [[[b""]]]])
def test_a_header_holds_only_what_a_file_can_say(value: Any) -> None:
    with pytest.raises(ProgramError, match="header field measured does not do"):
        Header(measured={"x": value})
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ProgramError, match="at most 64 levels"):
        Header(measured={"x": deep})


def test_base_dag_of_a_preset_and_of_synthetic_models() -> None:
    strategy = llama()
    dag = base_dag(strategy)
    assert (dag.model.layers, dag.model.seq_len, dag.global_batch, dag.stages) == (36, 4096, 64, 0)
    compiled = strategy.program.apply(dag, strategy.header.world)
    assert compiled.stages == 8
    assert base_dag(strategy, synthetic="moe:24", stages=8).stages == 8
    plain = Strategy(Header(model="dense:6", global_batch=8, sync=Sync.NONE), Program(()))
    dag = base_dag(plain, stages=3)
    assert (dag.model.layers, dag.stages, dag.global_batch, dag.sync) == (6, 3, 8, Sync.NONE)


@pytest.mark.parametrize(
    ("header", "options", "error", "words"),
    [
        (Header(), {}, ProgramError, "--synthetic dense:24"),
        (Header(model="llama9c"), {}, ConfigError, "llama9b"),
        (Header(model="llama9b"), {"stages": 4}, ProgramError, "cut other models with a stage directive"),
        (Header(model="llama9b"), {"synthetic": "sparse:4"}, ConfigError, "dense:LAYERS or moe:LAYERS"),
        (Header(model="dense:x"), {}, ConfigError, "dense:LAYERS or moe:LAYERS"),
        (Header(), {"synthetic": "dense:4", "stages": 5}, ConfigError, "1 to 4"),
        (Header(model="gpt3-175b", seq_len=10**6), {}, ConfigError, ""),
    ],
)
def test_base_dag_rejects(header: Header, options: dict[str, Any], error: type[PiperError], words: str) -> None:
    with pytest.raises(error) as caught:
        base_dag(Strategy(header, Program(())), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_means_what_json_means() -> None:
    text = (
        "a: 0x1f\nb: -010\nc: .5\nd: 1e-05\ne: null\nf: yes\ng: 2024-01-01\nh: ~\ni:\nj: '5'\n0: [true, {x: False}]\n"
    )
    assert read_document(text) == {
        "a": 31, "b": -10, "c": 0.5, "d": 1e-05, "e": None, "f": "yes", "g": "2024-01-01", "h": None, "i": None,
        "j": "5", "0": [True, {"x": False}],
    }  # fmt: skip
    assert read_document("\ufeff[1]") == [1]
    assert read_document("# a program\n--- # of nothing\n- {op: x, }\n") == [{"op": "x"}]
    assert read_document("[1, # one\n 2,]") == [1, 2]
