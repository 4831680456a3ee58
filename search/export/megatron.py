"""Megatron-LM arguments, and the same as fields of megatron-core's configuration classes.

Flags as in Megatron-LM's ``megatron/training/arguments.py``; fields as in megatron-core 0.16. Uneven stages become
``--pipeline-model-parallel-layout``, whose i-th entry is stage i (virtual stages round the ranks, as here).
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from piper_core.errors import ConfigError
from piper_core.schedule.grid import Layout
from search.export import megatron_model
from search.export.base import Export
from search.export.job import Job

SCRIPT, FIELDS = "megatron.sh", "megatron_core.json"
_STRATEGY = {2: "optim_grads", 3: "optim_grads_params"}


def export(job: Job) -> Export:
    """Return ``megatron.sh`` and ``megatron_core.json``.

    Raises:
        ConfigError: a model that is only synthetic, or microbatches that its interleaved schedule does not take.
    """
    if job.architecture is None:
        raise ConfigError(f"Megatron needs a real model, and {job.name} is a synthetic one")
    lost: list[str] = []
    flags, fields = megatron_model.model(job.architecture, job.seq_len, lost)
    ddp: dict[str, Any] = {}
    for part in (_parallel, _pipeline, _recompute):
        more_flags, more_fields = part(job, lost)
        flags |= more_flags
        fields |= more_fields
    more_flags, ddp = _data_parallel(job, lost)
    flags |= more_flags | {
        "micro-batch-size": job.micro_batch, "global-batch-size": job.global_batch, "bf16": True, "clip-grad": 1.0,
        "use-mcore-models": True, "transformer-impl": "transformer_engine",
    }  # fmt: skip
    fields |= {"bf16": True, "params_dtype": "bfloat16", "pipeline_dtype": "bfloat16"}
    data = {"transformer": fields, "ddp": ddp}
    return Export(
        {SCRIPT: _script(job, flags), FIELDS: json.dumps(data, indent=1) + "\n"},
        tuple(lost),
        (
            f"run {SCRIPT} on each node inside a Megatron-LM checkout; add data, tokenizer, learning rate and length",
            f"{FIELDS} names dtypes and the activation as torch and torch.nn.functional do",
        ),
    )


def _parallel(job: Job, lost: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    flags: dict[str, Any] = {"tensor-model-parallel-size": job.tp, "pipeline-model-parallel-size": job.pp}
    fields: dict[str, Any] = {"tensor_model_parallel_size": job.tp, "pipeline_model_parallel_size": job.pp}
    if job.tp > 1:
        flags["sequence-parallel"] = fields["sequence_parallel"] = job.sequence_parallel
    if job.cp > 1:
        flags["context-parallel-size"] = fields["context_parallel_size"] = job.cp
    if job.ep > 1:
        flags |= {"expert-model-parallel-size": job.ep, "expert-tensor-parallel-size": 1}
        fields |= {"expert_model_parallel_size": job.ep, "expert_tensor_parallel_size": 1}
        if job.tp > 1:
            lost.append("the layout of experts under tensor parallelism: Megatron's expert groups take in tensor ranks "
                        "(expert-tensor-parallel-size 1)")  # fmt: skip
    if not job.in_mesh_order:
        lost.append("the numbering of ranks: Megatron's is tensor, context, expert, data, pipeline from the inside out")
    return flags, fields


def _pipeline(job: Job, lost: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layout of stages.

    Raises:
        ConfigError: microbatches that the interleaved schedule does not take.
    """
    if job.pp == 1:
        return {}, {}
    schedule = job.strategy.header.schedule or "the order of this file"
    v = 1 if job.layout is Layout.BIDIRECTIONAL else job.virtual_stages
    runs = "interleaved 1F1B" if v > 1 else "1F1B"
    if job.layout is not Layout.LOOP:
        lost.append(f"how stages lie on ranks ({job.layout or 'their own way'}): Megatron lays them round and round")
    if schedule != ("interleaved_1f1b" if v > 1 else "1f1b"):
        lost.append(f"the order of compute ({schedule}): Megatron runs {runs}; time and memory differ from the "
                    "prediction")  # fmt: skip
    if v > 1 and job.microbatches % job.pp:
        near = max(job.pp, job.microbatches // job.pp * job.pp)
        raise ConfigError(
            f"Megatron's interleaved 1F1B needs microbatches divisible by pp {job.pp}, found {job.microbatches}; "
            f"{near} would do"
        )
    layout = layout_text(job.layers)
    fields: dict[str, Any] = {"pipeline_model_parallel_layout": layout}
    if v > 1:
        fields["virtual_pipeline_model_parallel_size"] = v
    return {"pipeline-model-parallel-layout": layout}, fields


def layout_text(layers: tuple[int, ...]) -> str:
    """Return stages as Megatron writes them: ``Ett|ttt|ttL``, runs of equal stages as ``(ttt|)*5``."""
    body = [f"t*{count}" if count > 3 else "t" * count for count in layers]
    first, middle, last = f"E{body[0]}", body[1:-1], f"{body[-1]}L"
    runs = [(text, len(list(group))) for text, group in groupby(middle)]
    joined = "".join(f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in runs)
    return f"{first}|{joined}{last}"


def _recompute(job: Job, lost: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    policies = set(job.recompute)
    if policies == {"none"}:
        return {}, {}
    if policies == {"selective"}:
        return ({"recompute-granularity": "selective", "recompute-modules": "core_attn"},
                {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]})  # fmt: skip
    block = _block(job)
    if policies != {"full"} and block is None:
        lost.append("recompute of some layers only: Megatron takes the same number of first layers in each stage; all "
                    "layers recompute here")  # fmt: skip
    if job.compiled.plan.repeated and any(job.compiled.plan.repeated):
        lost.append("recompute as an action of its own: Megatron recomputes at the start of each backward")
    method, count = ("uniform", 1) if block is None else ("block", block)
    return ({"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": count},
            {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count})  # fmt: skip


def _block(job: Job) -> int | None:
    """Return k where the first k layers of each stage, and no others, recompute in full."""
    counts, first = set(), 0
    for layers in job.layers:
        held = [policy == "full" for policy in job.recompute[first : first + layers]]
        if held != sorted(held, reverse=True):
            return None
        counts.add(sum(held))
        first += layers
    whole = set(job.recompute) == {"full"}
    return None if whole or len(counts) != 1 or set(job.recompute) - {"full", "none"} else counts.pop()


def _data_parallel(job: Job, lost: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return flags, and the fields of ``DistributedDataParallelConfig``."""
    if job.dp == 1:
        return {}, {}
    flags: dict[str, Any] = {"overlap-grad-reduce": True}
    ddp: dict[str, Any] = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True}
    if job.zero >= 1:
        flags |= {"use-distributed-optimizer": True, "overlap-param-gather": True}
        ddp |= {"use_distributed_optimizer": True, "overlap_param_gather": True}
    if job.zero >= 2:
        flags |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": _STRATEGY[job.zero],
                  "ckpt-format": "fsdp_dtensor", "no-gradient-accumulation-fusion": True}  # fmt: skip
        ddp |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _STRATEGY[job.zero]}
        if job.tp > 1 or job.cp > 1:
            lost.append("CUDA_DEVICE_MAX_CONNECTIONS: Megatron-FSDP forbids 1, which overlap of tensor parallelism "
                        "wants before Blackwell")  # fmt: skip
    if job.bucket_bytes:
        size = job.bucket_bytes // job.dag.dtype_bytes
        flags["ddp-bucket-size"] = ddp["bucket_size"] = size
    return flags, ddp


def _script(job: Job, flags: dict[str, Any]) -> str:
    per_node = min(8, job.gpus)
    nodes = -(-job.gpus // per_node)
    words = [f"  --{name}" + ("" if value is True else f" {_word(value)}")
             for name, value in flags.items() if value is not False]  # fmt: skip
    connections = "" if job.zero >= 2 else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    return f"""#!/bin/sh
# {job.name} on {job.gpus} GPUs: one call on each of {nodes} nodes of {per_node}; HEAD is the address of the first.
set -e
{connections}torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d \\
  --rdzv-endpoint "${{HEAD:-localhost}}:29500" pretrain_gpt.py \\
{(" " + chr(92) + chr(10)).join(words)} "$@"
"""


def _word(value: Any) -> str:
    text = str(value)
    return f"'{text}'" if any(letter in "|()*[], " for letter in text) else text
