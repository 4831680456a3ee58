"""A TorchTitan job (0.3): a Python configuration, the pipeline schedule that it loads, and how to start it.

TorchTitan takes its configuration from a function that returns ``Trainer.Config``:
``--module torchtitan_job --config job``. Dense models of the Llama kind are described whole, from TorchTitan's own
parts; for other models ``apply`` puts the parallelism of the strategy on a configuration of yours.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.schedule.grid import Layout
from search.export import pipeline_csv
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
    model, body = _model(job.architecture, job.name) if job.architecture else (None, "")
    if model is None:
        lost.append(f"the model {job.name}: TorchTitan's Llama parts cannot describe it, so call apply() on a "
                    "configuration of yours")  # fmt: skip
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


def _model(arch: Architecture, name: str) -> tuple[str | None, str]:
    """Return the kind of the model and the function that describes it; None where it is no Llama."""
    plain = arch.norm == "rms" and arch.activation == "silu" and arch.gated and not arch.experts and not arch.kv_rank
    odd = (arch.bias, arch.qkv_bias, arch.qk_norm, arch.post_norm, arch.learned_positions, arch.scaled_embedding,
           arch.query_scale, arch.logit_cap)  # fmt: skip
    scaling = arch.rope_scaling
    if not plain or any(odd) or arch.head_dim * arch.heads != arch.hidden:
        return None, ""
    if scaling is not None and scaling.kind != "llama3":
        return None, ""
    rope: dict[str, Any] = {"dim": arch.head_dim, "max_seq_len": arch.max_seq, "theta": arch.rope_theta}
    if scaling is not None:
        rope |= {"scaling": "llama", "scaling_factor": scaling.factor, "low_freq_factor": scaling.low,
                 "high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original}  # fmt: skip
    sizes = {"n_layers": arch.layers, "dim": arch.hidden, "n_heads": arch.heads, "n_kv_heads": arch.kv_heads,
             "hidden_dim": arch.ffn}  # fmt: skip
    return "llama3", _LLAMA.format(
        sizes=literal(sizes), rope=literal(rope), vocab=arch.vocab, dim=arch.hidden, tied=arch.tied, name=name
    )


_LLAMA = '''

SIZES = {sizes}
ROPE = {rope}
VOCAB = {vocab}


def job() -> Trainer.Config:
    """Return the whole job: model, parallelism, batch."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3 import (
        _EMBEDDING_INIT, _NORM_INIT, Llama3Model, _build_llama3_layers, _output_linear_init, model_registry,
    )

    dim = SIZES["dim"]
    spec = model_registry("debugmodel")  # for its functions; the sizes are replaced
    spec.flavor = "{name}"
    spec.model = Llama3Model.Config(
        dim=dim, vocab_size=VOCAB, enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCAB, param_init=_output_linear_init(dim)),
        layers=_build_llama3_layers(**SIZES, rope=ComplexRoPE.Config(**ROPE), attn_backend="flex"),
    )
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB))
    return apply(Trainer.Config(
        model_spec=spec, loss=loss, optimizer=default_adamw(lr=3e-4), training=TrainingConfig(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"), hf_assets_path="./assets/hf/{name}",
    ))
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
