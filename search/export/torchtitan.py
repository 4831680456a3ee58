"""A TorchTitan job (0.3): a Python configuration, the pipeline schedule that it loads, and how to start it.

TorchTitan takes its configuration from a function that returns ``Trainer.Config``:
``--module torchtitan_job --config job``. Models of the Llama and Qwen3 kinds, Mixtral among them, are described whole
from its own parts; for other models ``apply`` puts the parallelism of the strategy on a configuration of yours.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from piper_core.errors import ConfigError
from piper_core.schedule.grid import Layout
from search.export import pipeline_csv, torchtitan_model
from search.export.base import Export
from search.export.job import Job
from search.export.python_text import literal

JOB, RUN = "torchtitan_job.py", "run.sh"


def export(job: Job) -> Export:
    """Return ``torchtitan_job.py``, ``run.sh`` and, with a pipeline, ``schedule.csv``.

    Raises:
        ConfigError: a layout of stages, or degrees, that TorchTitan does not have.
    """
    lost: list[str] = []
    training, parallelism = _training(job), _parallelism(job, lost)
    files: dict[str, str] = {}
    notes = [f"sh {RUN} on each node; TorchTitan finds tokenizer, data and optimizer where torchtitan_job.py says"]
    if job.pp > 1:
        inner = pipeline_csv.export(job)
        files |= {pipeline_csv.FILE: inner.files[pipeline_csv.FILE]}
        lost += inner.lost
        parallelism |= {"pipeline_parallel_schedule_csv": pipeline_csv.FILE}
    recompute = _recompute(job, lost)
    body = torchtitan_model.function(job.architecture, job.name, lost) if job.architecture else ""
    if not body:
        lost.append(f"the model {job.name}: neither TorchTitan's Llama nor its Qwen3 parts describe it, so call "
                    "apply() on a configuration of yours")  # fmt: skip
    files[JOB] = _HEAD.format(name=job.name, gpus=job.gpus) + _apply(training, parallelism, recompute) + body
    files[RUN] = _run(job)
    lost.append("the step is AdamW with fp32 weights under FSDP mixed precision; gradients are clipped to norm 1.0")
    return Export(files, tuple(lost), tuple(notes))


def _training(job: Job) -> dict[str, Any]:
    share = job.micro_batch * (job.microbatches if job.pp > 1 else 1)
    return {"local_batch_size": share, "global_batch_size": job.global_batch, "seq_len": job.seq_len}


def _parallelism(job: Job, lost: list[str]) -> dict[str, Any]:
    """Return the fields of ``ParallelismConfig``.

    Raises:
        ConfigError: stages that lie as in none of its schedules.
    """
    sharded = job.zero >= 1
    replicas, shards = (1, job.dp) if sharded else (job.dp, 1)
    if job.zero == 1:
        lost.append("ZeRO-1: FSDP shards gradients too; parameters stay gathered after forward (ZeRO-2)")
    if job.zero == 2:
        lost.append("ZeRO-2: FSDP with reshard_after_forward=never keeps gathered parameters from forward to backward, "
                    "and gathers them again in each microbatch where there is no pipeline")  # fmt: skip
    if job.bucket_bytes and job.dp > 1:
        lost.append(f"buckets of {job.bucket_bytes // 2**20} MiB: FSDP communicates a layer at a time")
    if job.ep > 1 and not sharded:
        raise ConfigError("TorchTitan borrows expert ranks from FSDP: export a strategy with ZeRO 1 or more")
    made: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if job.zero == 3 else "never",
        "tensor_parallel_degree": job.tp,
        "enable_sequence_parallel": job.sequence_parallel,
        "context_parallel_degree": job.cp,
        "expert_parallel_degree": job.ep,
        "pipeline_parallel_degree": job.pp,
    }
    if job.pp == 1:
        return made
    if job.architecture is not None and job.architecture.tied:
        raise ConfigError(f"TorchTitan does not tie embedding and head across stages, as {job.name} does; search with "
                          "--fix pp=1")  # fmt: skip
    styles = {Layout.LOOP: "1F1B" if job.virtual_stages == 1 else "Interleaved1F1B", Layout.V: "ZBVZeroBubble"}
    if job.layout not in styles:
        raise ConfigError("TorchTitan lays stages round the ranks or as a V, each on one rank; this strategy does "
                          "neither")  # fmt: skip
    return made | {
        "pipeline_parallel_microbatch_size": job.micro_batch,
        "pipeline_parallel_schedule": styles[job.layout],
        "module_fqns_per_model_part": _parts(job),
    }


def _parts(job: Job) -> list[list[str]]:
    """Return the modules of each stage."""
    ends = list(accumulate(job.layers))
    parts = [[f"layers.{i}" for i in range(end - n, end)] for n, end in zip(job.layers, ends, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _recompute(job: Job, lost: list[str]) -> str:
    policies = set(job.recompute)
    if policies == {"none"}:
        return "None"
    if policies == {"full"}:
        return "FullAC.Config()"
    if policies == {"selective"}:
        lost.append("selective recompute: TorchTitan saves the results of matrix products and attention, not the same "
                    "tensors as here")  # fmt: skip
        return "SelectiveAC.Config()"
    count = sum(policy != "none" for policy in job.recompute)
    lost.append(f"recompute of {count} of {len(job.recompute)} layers: TorchTitan has one policy for all, full here")
    return "FullAC.Config()"


_HEAD = '''"""TorchTitan job for {name} on {gpus} GPUs, written by piper-search export."""

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer


'''


def _apply(training: dict[str, Any], parallelism: dict[str, Any], recompute: str) -> str:
    return f'''def apply(config: Trainer.Config) -> Trainer.Config:
    """Put the strategy on a configuration."""
    for name, value in TRAINING.items():
        setattr(config.training, name, value)
    config.parallelism = ParallelismConfig(**PARALLELISM)
    config.activation_checkpoint = {recompute}
    config.training.disable_cuda_graphs = True  # pipelines and full recompute do not capture
    return config


TRAINING = {literal(training)}
PARALLELISM = {literal(parallelism)}
'''


def _run(job: Job) -> str:
    per_node = min(8, job.gpus)
    nodes = -(-job.gpus // per_node)
    return f"""#!/bin/sh
# One call on each of {nodes} nodes of {per_node} GPUs; HEAD is the address of the first.
set -e
cd "$(dirname "$0")"
PYTHONPATH=. torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d \\
    --rdzv-endpoint "${{HEAD:-localhost}}:29500" \\
    -m torchtitan.train --module torchtitan_job --config job "$@"
"""
