"""Each exporter: what it writes, what it says that it loses, what it refuses."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from pathlib import Path

import pytest

from piper_core.directives import Stage
from piper_core.errors import ConfigError
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy, base_dag, dump
from piper_core.schedule.families import FAMILIES
from search.cli import main
from search.export import EXPORTERS, exporter
from search.export.base import Export
from search.export.job import job_of
from search.export.megatron import layout_text
from tests.null.export.strategies import MODEL, data_parallel, pipeline

TENSOR = {"op": "shard", "filter": {}, "kind": "sequence", "axis": "tp"}
RECOMPUTE = {"op": "recompute", "filter": {}, "policy": "full"}


def export(strategy: Strategy, target: str) -> Export:
    return exporter(target)(job_of(strategy))


def lost(made: Export) -> str:
    return "\n".join(made.lost)


def tensor(*, layers: tuple[int, ...] = (4, 5, 4, 3), model: str = MODEL) -> Strategy:
    """Interleaved over 2 rows, tp 2 with sequence parallelism, dp 2, ZeRO-1, full recompute."""
    return pipeline(
        "interleaved_1f1b", 2, 4, 2, row=4, mesh={"pp": 2, "dp": 2, "tp": 2}, global_batch=8,
        layers=list(layers), model=model,
        more=[TENSOR, data_parallel(shard_optimizer=True, bucket_size=50), RECOMPUTE],
    )  # fmt: skip


def test_the_job_is_read_from_the_plan() -> None:
    job = job_of(tensor())
    assert (job.pp, job.tp, job.dp, job.cp, job.ep, job.zero) == (2, 2, 2, 1, 1, 1)
    assert (job.sequence_parallel, job.micro_batch, job.microbatches, job.global_batch) == (True, 1, 4, 8)
    assert (job.layers, job.rows_of, job.layout) == ((4, 5, 4, 3), ((0,), (1,), (0,), (1,)), "loop")
    assert job.recompute == ("full",) * 16
    assert job.in_mesh_order


@pytest.mark.parametrize("target", EXPORTERS)
def test_every_target_writes_its_files_and_notes(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(pipeline("1f1b", 2, 4, row=2, more=[data_parallel()]), tmp_path / "mine.yaml")
    folder = tmp_path / "new" / "folder"
    assert main(["export", str(tmp_path / "mine.yaml"), "--to", target, "-o", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(map(Path, data["files"])) == sorted(folder.iterdir())
    notes = (folder / "NOTES.txt").read_text()
    assert all(what in notes for what in data["lost"] + data["notes"])
    assert main(["export", str(tmp_path / "mine.yaml"), "--to", target, "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("not expressed: ") == len(data["lost"])
    assert out.splitlines()[-1].startswith("written: ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--to", "alpa"], "invalid choice: 'alpa'"),
        ([], "required: --to"),
        (["--to", "csv", "-o", "mine.yaml"], "cannot be made"),
        (["--to", "csv", "-o", "mine.yaml/x"], "cannot be made"),
    ],
)
def test_refused_words(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dump(pipeline("1f1b", 2, 4), "mine.yaml")
    assert main(["export", "mine.yaml", *words]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("target", EXPORTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_for_every_target(family: str, target: str) -> None:
    """Files that parse; a stage on two rows is refused where there is no word for it."""
    p, v = 2, FAMILIES[family].virtual_stages(2)[0]
    strategy = pipeline(family, p, 4, v, row=2, model="llama3-8b", total=32, more=[data_parallel(bucket_size=64)])
    if family == "dualpipe" and target in ("piper", "torchtitan", "csv"):
        with pytest.raises(ConfigError, match=r"2 groups|does neither|one rank for a stage"):
            export(strategy, target)
        return
    made = export(strategy, target)
    for name, text in made.files.items():
        if name.endswith(".json"):
            json.loads(text)
        if name.endswith(".py"):
            compile(text, name, "exec")
    assert made.notes


def test_csv_names_every_action_once() -> None:
    made = export(pipeline("zbv", 2, 4, 2), "csv")
    rows = list(csv.reader(io.StringIO(made.files["schedule.csv"])))
    cells = [cell for row in rows for cell in row]
    assert len(rows) == 2
    assert len(set(cells)) == len(cells)
    forwards = {f"{stage}F{mb}" for stage in range(4) for mb in range(4)}
    assert forwards <= set(cells)
    assert len(cells) > 2 * len(forwards)


def test_csv_keeps_overlap_groups() -> None:
    made = export(pipeline("dualpipev", 2, 6, 2), "csv")
    assert "OVERLAP_F_B" in made.files["schedule.csv"]


@pytest.mark.parametrize("target", ["csv", "torchtitan", "piper"])
def test_a_stage_on_two_rows_is_refused(target: str) -> None:
    strategy = pipeline("dualpipe", 2, 4, row=2, more=[data_parallel()])
    with pytest.raises(ConfigError, match=r"stage 0|each on one rank"):
        export(strategy, target)


def test_uneven_tensor_degrees_are_refused() -> None:
    """Stages of different tensor degrees have no word elsewhere; the schedule alone can still be said."""
    shards = [{"op": "shard", "filter": {"PP": 0}, "kind": "tensor", "devices": [0, 1]}]
    strategy = pipeline("1f1b", 2, 2, row=2, more=shards, global_batch=2)
    for target in ("megatron", "torchtitan", "deepspeed"):
        with pytest.raises(ConfigError, match="one tensor degree for the whole model, found 1, 2"):
            export(strategy, target)
    assert export(strategy, "csv").files


def test_torchtitan() -> None:
    made = export(tensor(model="llama3-8b", layers=(8, 9, 8, 7)), "torchtitan")
    tree = ast.parse(made.files["torchtitan_job.py"])
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    parallelism = values["PARALLELISM"]
    parts = parallelism["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [8, 9, 8, 7]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
    assert parallelism["pipeline_parallel_schedule_csv"] in made.files
    assert (parallelism["tensor_parallel_degree"], parallelism["data_parallel_shard_degree"]) == (2, 2)
    assert values["TRAINING"] == {"local_batch_size": 4, "global_batch_size": 8, "seq_len": 1024}
    assert "FullAC.Config()" in made.files["torchtitan_job.py"]
    assert "ZeRO-1" in lost(made)
    assert {"def apply", "def job"} <= set(re.findall(r"^def \w+", made.files["torchtitan_job.py"], re.MULTILINE))
    assert "the model" not in lost(made)


def test_torchtitan_leaves_other_models_to_the_person() -> None:
    made = export(pipeline("1f1b", 2, 2, model="deepseek-v3", total=61), "torchtitan")
    assert "def job" not in made.files["torchtitan_job.py"]
    assert "the model deepseek-v3" in lost(made)
    experts = export(pipeline("1f1b", 2, 2, model="mixtral-8x7b", total=32), "torchtitan")
    assert "_build_qwen3_moe_layers" in experts.files["torchtitan_job.py"]
    assert "auxiliary loss" in lost(experts)
    with pytest.raises(ConfigError, match="does not tie embedding and head"):
        export(pipeline("1f1b", 2, 2, model="gpt2-xl", total=48), "torchtitan")


def test_megatron() -> None:
    made = export(tensor(), "megatron")
    script, data = made.files["megatron.sh"], json.loads(made.files["megatron_core.json"])
    for words in ("--tensor-model-parallel-size 2", "--sequence-parallel ", "--use-distributed-optimizer",
                  "--pipeline-model-parallel-layout 'Et*4|t*5|t*4|tttL'", "--recompute-granularity full",
                  "--ddp-bucket-size 26214400", "--micro-batch-size 1", "--global-batch-size 8"):  # fmt: skip
        assert words in script
    assert data["transformer"]["virtual_pipeline_model_parallel_size"] == 2
    assert data["ddp"]["overlap_param_gather"] is True
    assert made.lost == ()


def test_megatron_says_what_it_runs_instead() -> None:
    made = export(pipeline("zbv", 2, 4, 2, row=2, more=[data_parallel()]), "megatron")
    assert "runs interleaved 1F1B" in lost(made)
    assert "how stages lie on ranks (v)" in lost(made)
    with pytest.raises(ConfigError, match="divisible by pp 2, found 3; 2 would do"):
        export(pipeline("zbv", 2, 3, 2), "megatron")
    with pytest.raises(ConfigError, match="needs a real model"):
        export(pipeline("1f1b", 2, 2, model="dense:16"), "megatron")


def test_recompute_of_the_first_layers_of_each_stage() -> None:
    first = {"op": "recompute", "filter": {"LAYER": [0, 1, 8, 9]}, "policy": "full"}
    script = export(pipeline("1f1b", 2, 2, more=[first]), "megatron").files["megatron.sh"]
    assert "--recompute-method block" in script
    assert "--recompute-num-layers 2" in script
    uneven = export(pipeline("1f1b", 2, 2, more=[first | {"filter": {"LAYER": [0, 1, 8]}}]), "megatron")
    assert "some layers only" in lost(uneven)
    assert "--recompute-method uniform" in uneven.files["megatron.sh"]


@pytest.mark.parametrize(
    ("layers", "text"),
    [((2, 3, 3, 2), "Ett|(ttt|)*2ttL"), ((5, 4), "Et*5|t*4L"), ((1, 5, 5, 2, 1), "Et|(t*5|)*2tt|tL")],
)
def test_layout_text(layers: tuple[int, ...], text: str) -> None:
    assert layout_text(layers) == text


def test_deepspeed() -> None:
    strategy = pipeline("1f1b", 1, 4, row=4, mesh={"dp": 4}, global_batch=32,
                        more=[data_parallel(shard_grads=True, shard_params=True, bucket_size=100)])  # fmt: skip
    data = json.loads(export(strategy, "deepspeed").files["ds_config.json"])
    assert (data["train_batch_size"], data["train_micro_batch_size_per_gpu"]) == (32, 2)
    assert data["gradient_accumulation_steps"] == 4
    assert data["zero_optimization"]["stage"] == 3
    with pytest.raises(ConfigError, match="takes ZeRO 0 or 1"):
        export(pipeline("1f1b", 2, 4, row=2, more=[data_parallel(shard_grads=True)]), "deepspeed")
    assert "layers of each stage (8, 8)" in lost(export(pipeline("1f1b", 2, 4), "deepspeed"))


@pytest.mark.parametrize(
    "strategy",
    [
        pipeline("1f1b", 2, 4, row=2, more=[data_parallel(shard_grads=True)], sync="none"),
        pipeline("zbv", 2, 4, 2, sync="none"),
        pipeline("interleaved_1f1b", 2, 4, 2, sync="none", layers=[5, 4, 4, 3]),
    ],
)
def test_piper_reads_back_to_the_same_plan(strategy: Strategy) -> None:
    """The JSON, on a model that carries the annotated stages, compiles to the same DAG."""
    job = job_of(strategy)
    made = exporter("piper")(job)
    stages = json.loads(made.files["annotations.json"])["PP"]
    layers = tuple(each["last_layer"] - each["first_layer"] + 1 for each in stages)
    annotated = Stage(layers_per_stage=layers).apply(base_dag(strategy))
    again = Program.parse(json.loads(made.files["program.json"])).apply(annotated)
    for column in ("kind", "phase", "stage", "microbatch", "group", "collective", "payload"):
        assert getattr(again.nodes, column).tolist() == getattr(job.dag.nodes, column).tolist()
    assert [state.zero_stage for state in again.states if state.replication] == [
        job.zero for state in again.states if state.replication
    ]
    assert again.groups == job.dag.groups
    assert again.overlaps == job.dag.overlaps


def test_piper_names_what_it_cannot_say() -> None:
    with pytest.raises(ConfigError, match="no sequence parallelism"):
        export(tensor(), "piper")
    words = lost(export(pipeline("1f1b", 2, 2, more=[RECOMPUTE]), "piper"))
    assert "recompute (full)" in words
    assert "gradient clipping" in words


def test_perfetto() -> None:
    made = json.loads(export(pipeline("1f1b", 2, 4), "perfetto").files["timeline.perfetto.json"])
    events = made["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"0F0", "1B3", "0UPDATE"} <= names
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["pid"] for event in counters} == {0, 1}
    assert all(event["args"]["GiB"] > 0 for event in counters)


def test_perfetto_needs_a_cluster() -> None:
    with pytest.raises(ConfigError, match="names no cluster"):
        export(pipeline("1f1b", 2, 4, cluster=None), "perfetto")
