"""A DeepSpeed configuration (0.19): the JSON that ``deepspeed.initialize`` takes, and what the engine cannot do."""

from __future__ import annotations

import json
from typing import Any

from piper_core.errors import ConfigError
from search.export.base import Export
from search.export.job import Job

FILE = "ds_config.json"


def export(job: Job) -> Export:
    """Return ``ds_config.json``.

    Raises:
        ConfigError: ZeRO-2 or 3 with a pipeline, which the pipeline engine refuses.
    """
    if job.pp > 1 and job.zero >= 2:
        raise ConfigError(
            f"DeepSpeed's pipeline engine takes ZeRO 0 or 1, and this strategy has pp {job.pp} and ZeRO {job.zero}; "
            "search with --fix pp=1, or zero=0,1"
        )
    lost: list[str] = []
    zero: dict[str, Any] = {"stage": job.zero, "overlap_comm": job.zero > 0, "contiguous_gradients": True}
    if job.bucket_bytes:
        size = job.bucket_bytes // job.dag.dtype_bytes
        zero |= {"reduce_bucket_size": size, "allgather_bucket_size": size}
        if job.zero == 3:
            zero["stage3_prefetch_bucket_size"] = size
    data: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    data |= _pipeline(job, lost) | _recompute(job, lost)
    _others(job, lost)
    return Export(
        {FILE: json.dumps(data, indent=1) + "\n"},
        tuple(lost),
        (f"deepspeed.initialize(config={FILE!r}, ...) on {job.gpus} ranks; the optimizer is yours, such as AdamW",),
    )


def _pipeline(job: Job, lost: list[str]) -> dict[str, Any]:
    if job.pp == 1:
        return {}
    schedule = job.strategy.header.schedule or "the order of this file"
    if schedule != "1f1b" or job.virtual_stages > 1:
        lost.append(f"the order of compute ({schedule}, {job.virtual_stages} stages a rank): DeepSpeed's pipeline "
                    "engine runs 1F1B with one stage a rank")  # fmt: skip
    lost.append(f"layers of each stage ({', '.join(map(str, job.layers))}): they come from "
                f"PipelineModule(num_stages={job.pp}, partition_method=...), not from the configuration")  # fmt: skip
    return {"pipeline": {"stages": job.pp, "pipe_partitioned": job.tp > 1, "grad_partitioned": job.tp > 1}}


def _recompute(job: Job, lost: list[str]) -> dict[str, Any]:
    policies = set(job.recompute)
    if policies == {"none"}:
        return {}
    lost.append(
        f"which layers recompute ({', '.join(sorted(policies))}): the model calls deepspeed.checkpointing.checkpoint, "
        "or PipelineModule(activation_checkpoint_interval=1)"
    )
    return {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}


def _others(job: Job, lost: list[str]) -> None:
    if job.tp > 1:
        kind = "with sequence parallelism" if job.sequence_parallel else "without sequence parallelism"
        lost.append(
            f"tensor parallelism of {job.tp} {kind}: it comes from the model (Megatron's layers) and an mpu object"
        )
    if job.cp > 1:
        lost.append(f"context parallelism of {job.cp}: DeepSpeed has Ulysses, given in code (sequence_parallel_size)")
    if job.ep > 1:
        lost.append(f"expert parallelism of {job.ep}: MoE(ep_size={job.ep}) in the model")
    lost.append("streams: the engine has its own for reductions and gathers")
