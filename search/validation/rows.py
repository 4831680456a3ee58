"""Published measurements as requests: a row of a table becomes a model, a cluster, kernels and a strategy.

Only columns that describe a run are read, never those that were measured. A row that cannot be said as a strategy
raises, with its reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from piper_core.arch.chunk import AttentionKernel, Fusion
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import Sync
from profiler.spec import Cluster, load_cluster
from search.cost.software import Software
from search.request import Kernels, Request

Row = Mapping[str, str]
GIGABIT = 1e9 / 8
GPT2_PADDED, SENTENCEPIECE = 50_304, 32_000
"""Vocabularies where none is published: GPT-2's, padded as Megatron does for one rank; of the zero-bubble runs, whose
examples/pretrain_zero_bubble.sh names a SentencePiece tokenizer, the size that makes 14.6 and 28.3 billion parameters
of the shapes that arXiv 2401.10241 calls so. That script also unties embedding and head."""


class NotExpressedError(ConfigError):
    """A row that no strategy of ours says; the text is the reason."""


def request_of(row: Row) -> Request:
    """Return what a row ran.

    Raises:
        NotExpressedError: a field that decides the time is missing, or asks for what is not modelled.
        ConfigError: numbers that no strategy can have.
    """
    architecture = _architecture(row)
    recompute = _recompute(row)
    schedule, sync = _schedule(row)
    pp, v = _count(row, "pp"), _count(row, "vp", 1)
    return Request(
        architecture, _cluster(row), gpus=_count(row, "n_gpus"), global_batch=_count(row, "global_batch"),
        seq_len=_count(row, "seq_len"), micro_batch=_count(row, "micro_batch"), tp=_count(row, "tp"), pp=pp,
        dp=_count(row, "dp"), ep=_count(row, "ep", 1), cp=_count(row, "cp", 1), virtual_stages=v,
        zero=_count(row, "zero_stage", 0), schedule=schedule, recompute=recompute,
        sequence_parallel=_text(row, "sp") == "yes", kernels=_kernels(row, architecture), sync=sync,
        layers=_layers(row, architecture.layers, pp * v), bucket_mib=_bucket(row), software=_software(row),
    )  # fmt: skip


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()


def _number(row: Row, name: str) -> float | None:
    text = _text(row, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"column {name}: expected a number of at least 0, found {text[:40]!r}")
    return value


def _count(row: Row, name: str, default: int | None = None) -> int:
    value = _number(row, name)
    if value is None and default is None:
        raise NotExpressedError(f"{name} is not published")
    count = default if value is None else value
    if count != int(count or 0):
        raise ConfigError(f"column {name}: expected a whole number, found {count}")
    return int(count or 0)


def _architecture(row: Row) -> Architecture:
    """Return the model: LLaMA's blocks, or GPT's (biases, LayerNorm, learned positions, one embedding at both ends)."""
    name = _text(row, "model")
    llama = re.match(r"(llama|internlm|qwen|mistral|mixtral|baichuan)", name, re.IGNORECASE)
    if not llama and not re.match(r"(gpt|mpt|bloom|opt|turing|megatron)", name, re.IGNORECASE):
        raise NotExpressedError(f"model {name[:40]!r} is of no family that is known here: LLaMA's or GPT's blocks")
    hidden, heads, seq = _count(row, "hidden"), _count(row, "heads"), _count(row, "seq_len")
    experts, ffn = _count(row, "experts", 0), _count(row, "ffn")
    zero_bubble = "sail-sg" in _text(row, "framework")
    vocab = _count(row, "vocab", SENTENCEPIECE if zero_bubble else GPT2_PADDED)
    record = Architecture(
        name, _count(row, "layers"), hidden, ffn, heads, _count(row, "kv_heads", heads), hidden // heads, vocab,
        max_seq=seq,
    )  # fmt: skip
    if experts:
        record = replace(record, ffn=0, experts=experts, top_k=_count(row, "topk"), expert_ffn=ffn)
    if llama:
        return record
    return replace(
        record, gated=False, bias=True, tied=not zero_bubble, activation="gelu_tanh", norm="layer",
        learned_positions=seq,
    )  # fmt: skip


def _cluster(row: Row) -> Cluster:
    """Return the machine: node type by device, network by the words of ``interconnect``."""
    gpu, memory, words = _text(row, "gpu"), _number(row, "gpu_mem_gb"), _text(row, "interconnect")
    if gpu == "A100-SXM":
        base = load_cluster("p4d" if memory == 40 else "dgx-a100")
        base = replace(base, **{f: getattr(load_cluster("dgx-a100"), f) for f in _NETWORK})
    elif gpu == "A800-SXM":
        base = replace(load_cluster("dgx-a100"), link_bytes_per_s=200e9)
    elif gpu.startswith("H100-SXM"):
        base = load_cluster("dgx-h100")
    else:
        raise NotExpressedError(f"gpu {gpu[:40]!r} is not known here")
    if "96GB HBM2e" in gpu:
        base = replace(base, device=replace(base.device, memory_bytes=96e9, memory_bytes_per_s=2.4e12))
    cards = re.search(r"(\d+)x(\d+)Gb", words)
    whole = re.search(r"(\d+) Gbps/node", words)
    if cards:
        nics, speed = int(cards[1]), int(cards[2])
    elif whole:
        nics, speed = 8, int(whole[1]) // 8
    else:  # not printed: what such nodes have, one card a GPU
        nics, speed = base.nics_per_node, round(base.nic_bytes_per_s / GIGABIT)
    return replace(base, gpus_per_node=_count(row, "gpus_per_node", 8), nics_per_node=nics,
                   nic_bytes_per_s=speed * GIGABIT, name=f"{gpu} {words}")  # fmt: skip


_NETWORK = ("nics_per_node", "nic_bytes_per_s", "network_efficiency", "network_latency_s", "oversubscription")


def _recompute(row: Row) -> str:
    policy = _text(row, "activation_recompute")
    if policy in ("none", "selective", "full"):
        return policy
    if policy == "selective-layer(every 2nd)" and _count(row, "pp") == 1:
        return str(_count(row, "layers") // 2)
    if not policy:
        raise NotExpressedError("activation_recompute is not published")
    raise NotExpressedError(f"recompute {policy!r}: this choice of saved tensors is not modelled")


_SCHEDULES = {"none": "1f1b", "1F1B": "1f1b", "1F1B-interleaved": "interleaved_1f1b", "ZB-1p": "zb_h1",
              "ZB-2p": "zb_h2", "ZB-V": "zbv", "1F1B (interleaving unstated)": "1f1b"}  # fmt: skip


def _schedule(row: Row) -> tuple[str, Sync]:
    name = _text(row, "schedule")
    if name not in _SCHEDULES:
        raise NotExpressedError(f"schedule {name!r} is not known here" if name else "schedule is not published")
    late = name.startswith("ZB") and "instead of post-validation" not in _text(row, "notes")
    return _SCHEDULES[name], Sync.POST_VALIDATION if late else Sync.GLOBAL_NORM


def _layers(row: Row, layers: int, stages: int) -> tuple[int, ...] | str:
    if "AA scaling" in _text(row, "framework") and stages > 1:
        return _modules(layers, stages)
    if "first & last stage hold one transformer layer fewer" not in _text(row, "notes"):
        return "even"
    each = (layers + 2) // stages
    return (each - 1, *(each,) * (stages - 2), each - 1)


def _modules(layers: int, stages: int) -> tuple[int, ...]:
    """Return layers per stage where stages hold equally many modules: embedding, layers, norm, head (``SCALING``)."""
    each, more = divmod(layers + 3, stages)
    held = [each + (stage < more) for stage in range(stages)]
    held[0] -= 1
    held[-1] -= 2
    if min(held) < 0:
        raise NotExpressedError(f"{layers + 3} modules on {stages} stages: norm and head are apart there")
    return tuple(held)


_HAGEMANN: dict[str, AttentionKernel] = {
    "flash_attention2": "flash2",
    "flash_attentionv1.0.8": "flash1",
    "fused": "unfused",
    "torch": "eager",
}

_WRITTEN = ("unfused", "eager")
"""Kernels that write scores, of a program older than the published one, which has no fused softmax: dropout is taken
as on there, since time and memory of those runs are as if it were."""


def _kernels(row: Row, architecture: Architecture) -> Kernels:
    """Return the kernels that columns and notes name; what GPT's code in Megatron runs is known from that code."""
    framework, notes, dtype = _text(row, "framework"), _text(row, "notes"), _text(row, "dtype")
    if dtype == "fp8":
        raise NotExpressedError("fp8 products are not modelled")
    kernel = re.search(r"kernel=([^;]*)", notes)
    if kernel:
        name, *more = (part.strip() for part in kernel[1].split("+"))
        if name not in _HAGEMANN:
            raise NotExpressedError(f"kernel {name[:40]!r} is not known here")
        attention = _HAGEMANN[name]
        norm: Fusion = "fused" if more == ["RMS kernel"] else "unfused"
        return Kernels(attention, norm, "unfused", dropout=attention in _WRITTEN)
    flash = _text(row, "attention") == "flash"
    if "Composer" in framework:
        return Kernels("triton", loss="half")
    if architecture.gated:
        # InternEvo's norms are of fp32 tensors, and run again in the backward (``dropout_selective_checkpoint``)
        eager = "InternEvo" in framework or ("torchtitan" in framework and "compile" not in framework)
        return Kernels("flash2" if flash else "unfused", "unfused" if eager else "fused")
    return Kernels("flash2" if flash else "unfused", dropout=True)


PARAMETER_MIB = 1
"""Buckets so small that each holds one parameter: DeepSpeed's third stage of 2021 gathers every one by itself."""


def _bucket(row: Row) -> int | None:
    """Return the size of gradient buckets: one for each stage, so nothing overlaps, where the source says so."""
    notes = _text(row, "notes")
    if "DeepSpeed ZeRO-3" in _text(row, "framework"):
        return PARAMETER_MIB
    return (
        0
        if "not overlapped" in notes or ("no grad overlap" in notes and (_number(row, "params_b") or 0) > 18)
        else None
    )


SCALING = Software(
    gradient_bytes=2,
    separate_gate=True,
    keeps_gathered=True,
    repeats_layers=True,
    gathers_logits=True,
    blocks_messages=True,
)
"""Aleph-Alpha/scaling as published in 2024, src/scaling: ParallelSwiGLUMLP has two column-parallel modules, attention
one (``attention_qkv_in_one``); RMSNorm gathers sequence-parallel parts, and autograd keeps them; TransformerLMHead
joins the logits of all ranks, and CrossEntropyLoss widens them; PipeCommunicator waits for ``send`` and ``recv``;
``pipe_partition_method`` is uniform over modules; dropout is 0. Its runs are of 2023, and their settings beyond those
printed were not published: these are the defaults. That gate and up each scatter their part of a sequence-parallel
input's gradient is inferred from those runs (else 65B rows come out 3 % too quick): the code of 2024 adds them
first."""
HOLD_S = 5e-4
"""What a pipeline message of Megatron costs compute: the device is synchronised after it, and idles until Python goes
on (the zero-bubble paper, arXiv 2401.10241, table 9, profiles 0.4 to 0.8 ms a message)."""


OTHERS = Software(repeats_layers=True)
"""The rest: most are of before torch's checkpointing stopped early (2.1), and the rows of TorchTitan, which has it, fit
better so as well (1.2 against 3.6 % off)."""


def _software(row: Row) -> Software:
    """Return the habits of the training program, as its source describes them."""
    framework, dtype = _text(row, "framework"), _text(row, "dtype")
    if "AA scaling" in framework:
        return SCALING
    if "InternEvo" in framework:
        # its HybridZeroOptimizer reduces gradients everywhere, whatever shares the optimiser's state
        group = re.search(r"zero1 group=(\d+)", _text(row, "notes"))
        return Software(
            gradient_bytes=2, repeats_layers=True, shard_group=int(group[1]) if group else _count(row, "dp")
        )
    if "DeepSpeed" in framework:
        return Software(
            gradient_bytes=2, repeats_layers=True, message_hold_s=HOLD_S if "Megatron" in framework else 0.0
        )
    if "Megatron" in framework:
        return Software(
            gradient_bytes=2 if dtype == "fp16" else 4, hides_backward=True, repeats_layers=True, message_hold_s=HOLD_S
        )
    return OTHERS
