"""What one schedulable piece of model compute costs, holds and exchanges, for one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from piper_core.names import Region

AttentionKernel = Literal["flash2", "flash1", "triton", "unfused", "eager"]
"""``flash1`` and ``flash2`` are the two versions of FlashAttention, ``triton`` the first one written in Triton, with a
bias on scores; ``unfused`` writes scores and runs one fused softmax kernel (Megatron's), ``eager`` one kernel for each
operation, in fp32."""
Fusion = Literal["fused", "unfused"]
LossWidth = Literal["fp32", "half"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor: ``numel`` elements; which kinds of ``shard`` divide it.

    ``tie`` names the group of parameters that are one tensor in the model ("" for none); ``used`` is the part of it
    that one token meets.
    """

    name: str
    numel: int
    tensor: bool = True
    expert: bool = False
    tie: str = ""
    used: float = 1.0


@dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix product for one sequence: m x k times k x n, ``groups`` times (one for each expert).

    ``tokens`` names the dimension that grows with the batch: "m" in F and BI, "k" in BW. ``split`` names
    the dimension that tensor parallelism divides ("" for none).
    """

    m: float
    n: float
    k: float
    tokens: Literal["m", "k"] = "m"
    split: Literal["m", "n", "k", ""] = ""
    groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one sequence."""
        return 2.0 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one phase of a chunk for one sequence.

    ``matmul_flops`` and ``attention_flops`` in FLOPs, as executed (a causal flash kernel skips half);
    ``memory_bytes`` is traffic of memory-bound ops that tensor parallelism divides, ``replicated_bytes``
    traffic that only sequence or context parallelism divides; ``weight_bytes`` is moved once whatever the
    batch; ``kernels`` counts launches (not per sequence). ``matmuls`` gives the shapes behind
    ``matmul_flops`` where they are known, ``attention_kernel`` the kernel behind ``attention_flops``,
    ``attention_span`` the FLOPs of its longest block, which one multiprocessor does alone whatever the batch, and
    ``attention_inner`` the harmonic mean of the inner dimensions of its products where they are kernels of their own
    (0: they are not).
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    memory_bytes: float = 0.0
    replicated_bytes: float = 0.0
    weight_bytes: float = 0.0
    kernels: int = 0
    matmuls: tuple[Matmul, ...] = ()
    attention_kernel: AttentionKernel = "flash2"
    attention_span: float = 0.0
    attention_inner: float = 0.0

    @property
    def flops(self) -> float:
        """All FLOPs of the phase for one sequence."""
        return self.matmul_flops + self.attention_flops

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.attention_flops + other.attention_flops,
            self.memory_bytes + other.memory_bytes,
            self.replicated_bytes + other.replicated_bytes,
            self.weight_bytes + other.weight_bytes,
            self.kernels + other.kernels,
            self.matmuls + other.matmuls,
            self.attention_kernel if self.attention_flops else other.attention_kernel,
            max(self.attention_span, other.attention_span),
            max(self.attention_inner, other.attention_inner),
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes for one sequence: ``sharded`` is divided by tensor parallelism, ``replicated`` only by
    sequence or context parallelism (which divides both)."""

    sharded: float = 0.0
    replicated: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.sharded + other.sharded, self.replicated + other.replicated)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One region of one layer.

    ``layer`` is -1 for the embedding and L (the number of layers) for final norm and head. ``output_bytes``
    is the activation handed to the next chunk, ``hidden_bytes`` one hidden-state tensor (what tensor
    parallelism reduces), ``column_bytes`` what enters its column-parallel layers where that is something else (0: it
    is the hidden state), ``token_bytes`` what expert parallelism dispatches (top-k copies), ``kv_bytes`` keys
    and values (what a ring exchanges), ``qkvo_bytes`` what an all-to-all context exchange moves; all bytes
    are for one sequence. ``saved`` is held from F to the end of the backward without recompute,
    ``saved_selective`` with selective recompute, ``saved_full`` (the input) with full recompute. ``stash`` is
    the part of saved plus output gradients that BW needs after BI. ``core`` is the work that selective
    recompute repeats, ``again`` what full recompute repeats where that is less than the forward: of a layer's last
    region nobody asks for what it hands on. ``loss_bytes`` is what a vocabulary-parallel loss reduces.
    ``workspace_bytes`` is the largest transient of the backward, divided like sharded bytes. ``tags`` are extra
    (name, index) annotations such as ("EP", 3).
    """

    region: Region
    layer: int
    forward: Work
    backward_input: Work
    backward_weight: Work
    core: Work = Work()
    again: Work | None = None
    parameters: tuple[Parameter, ...] = ()
    output_bytes: float = 0.0
    hidden_bytes: float = 0.0
    column_bytes: float = 0.0
    token_bytes: float = 0.0
    kv_bytes: float = 0.0
    qkvo_bytes: float = 0.0
    saved: Saved = Saved()
    saved_selective: Saved = Saved()
    saved_full: Saved = Saved()
    stash: Saved = Saved()
    workspace_bytes: float = 0.0
    loss_bytes: float = 0.0
    tags: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """Text id, e.g. ``L3.attention`` (``embed`` and ``head`` stand alone)."""
        return str(self.region) if self.region in (Region.EMBED, Region.HEAD) else f"L{self.layer}.{self.region}"

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def flops(self) -> float:
        """FLOPs of one sequence, forward and backward, without recompute."""
        return self.forward.flops + self.backward_input.flops + self.backward_weight.flops


@dataclass(frozen=True, slots=True)
class ModelChunks:
    """The closed-form or traced table of a model: ``chunks`` in forward order and their data edges.

    ``edges`` are (producer, consumer, bytes for one sequence) in chunk indices. ``units`` says, for each
    kind of shard, the number that its degree must divide (missing: any degree).
    """

    name: str
    layers: int
    seq_len: int
    chunks: tuple[Chunk, ...]
    edges: tuple[tuple[int, int, float], ...]
    dtype_bytes: int = 2
    units: tuple[tuple[str, int], ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel for parameter in self._distinct())

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token meets: of the experts, only those picked for it."""
        return round(sum(parameter.numel * parameter.used for parameter in self._distinct()))

    def _distinct(self) -> Iterator[Parameter]:
        seen: set[str] = set()
        for chunk in self.chunks:
            for parameter in chunk.parameters:
                if not parameter.tie or parameter.tie not in seen:
                    seen.add(parameter.tie)
                    yield parameter
