"""The files that exporters write, read by the systems that they are for, where those are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from piper_core.program.strategy import Strategy
from search.export import exporter
from search.export.job import job_of
from tests.null.export.strategies import data_parallel, pipeline

TENSOR = {"op": "shard", "filter": {}, "kind": "sequence", "axis": "tp"}
RECOMPUTE = {"op": "recompute", "filter": {}, "policy": "full"}
EXPERTS = {"op": "shard", "filter": {"REGION": "expert"}, "axis": "ep"}
MESH = {"pp": 2, "dp": 2, "tp": 2}


def strategies() -> dict[str, Strategy]:
    interleaved = [TENSOR, data_parallel(shard_optimizer=True, bucket_size=50), RECOMPUTE]
    return {
        "interleaved": pipeline("interleaved_1f1b", 2, 4, 2, row=4, mesh=MESH, global_batch=8, layers=[4, 5, 4, 3],
                                more=interleaved),
        "zbv": pipeline("zbv", 2, 4, 2, row=2, more=[data_parallel(shard_grads=True)]),
        "zero3": pipeline("1f1b", 1, 2, row=4, mesh={"dp": 4},
                          more=[data_parallel(shard_grads=True, shard_params=True)]),
        "uneven": pipeline("1f1b", 2, 4, layers=[9, 7],
                           more=[{"op": "recompute", "filter": {"LAYER": [0, 1, 9, 10]}, "policy": "full"}]),
        "experts": pipeline("1f1b", 2, 4, row=4, mesh={"pp": 2, "edp": 2, "ep": 2}, model="mixtral-8x7b", total=32,
                            more=[EXPERTS, data_parallel() | {"axis": "edp+ep"}]),
        "latent": pipeline("1f1b", 2, 4, model="deepseek-v3", total=61),
        "llama": pipeline("interleaved_1f1b", 2, 4, 2, row=4, mesh=MESH, global_batch=8, layers=[8, 9, 8, 7],
                          model="llama3-8b", more=interleaved),
        "llama zbv": pipeline("zbv", 2, 4, 2, row=2, model="llama3-8b", total=32,
                              more=[data_parallel(shard_grads=True, shard_params=True)]),
    }  # fmt: skip


def need(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def apart(code: str, *words: str, folder: Path) -> Any:
    """Run code in a process of its own; return the JSON on its last line."""
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def write(name: str, target: str, folder: Path) -> None:
    for file, text in exporter(target)(job_of(strategies()[name])).files.items():
        (folder / file).write_text(text)


TITAN = """
import json, sys
sys.path.insert(0, ".")
from torchtitan.config.manager import ConfigManager
made = ConfigManager().parse_args(["--module", "torchtitan_job", "--config", "job"])
made.model_spec.model.update_from_config(config=made)  # what the trainer checks first
p = made.parallelism
layers = made.model_spec.model.layers
print(json.dumps([p.pipeline_parallel_degree, p.tensor_parallel_degree, p.data_parallel_shard_degree, len(layers),
                  p.pipeline_parallel_schedule_csv, made.training.global_batch_size, layers[0].attention.n_heads]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [2, 2, 2, 32, "schedule.csv", 8, 32]),
        ("llama zbv", [2, 1, 2, 32, "schedule.csv", 8, 32]),
        ("uneven", [2, 1, 1, 16, "schedule.csv", 4, 16]),
    ],
)
def test_torchtitan_reads_the_job(name: str, expected: list[object], tmp_path: Path) -> None:
    need("torchtitan")
    write(name, "torchtitan", tmp_path)
    assert apart(TITAN, folder=tmp_path) == expected


MEGATRON = """
import json, torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
data = json.load(open("megatron_core.json"))
fields = data["transformer"]
fields |= {name: getattr(torch, fields[name]) for name in ("params_dtype", "pipeline_dtype")}
fields["activation_func"] = getattr(torch.nn.functional, fields["activation_func"])
made = (MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig)(**fields)
DistributedDataParallelConfig(**data["ddp"])
layout = made.pipeline_model_parallel_layout
print(json.dumps([made.num_layers, [[len(stage) for stage in row] for row in layout.layout] if layout else None]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [("interleaved", [16, [[5, 4], [5, 4]]]), ("zbv", [16, [[5, 4], [4, 5]]]), ("zero3", [16, None]),
     ("uneven", [16, [[10], [8]]]), ("experts", [32, [[17], [17]]]), ("latent", [61, [[32], [31]]])],
)  # fmt: skip
def test_megatron_core_takes_the_fields(name: str, expected: list[object], tmp_path: Path) -> None:
    need("megatron")
    write(name, "megatron", tmp_path)
    assert apart(MEGATRON, folder=tmp_path) == expected


DEEPSPEED = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
class Ranks:
    def get_data_parallel_world_size(self):
        return int(sys.argv[1])
import deepspeed.comm as dist
dist.get_rank = lambda: 0
made = DeepSpeedConfig("ds_config.json", mpu=Ranks())
print(json.dumps([made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps,
                  int(made.zero_config.stage), made.gradient_clipping]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [("interleaved", 2, [8, 1, 4, 1, 1.0]), ("zero3", 4, [8, 1, 2, 3, 1.0]), ("uneven", 1, [4, 1, 4, 0, 1.0])],
)
def test_deepspeed_takes_the_configuration(name: str, ranks: int, expected: list[object], tmp_path: Path) -> None:
    need("deepspeed")
    write(name, "deepspeed", tmp_path)
    assert apart(DEEPSPEED, str(ranks), folder=tmp_path) == expected
