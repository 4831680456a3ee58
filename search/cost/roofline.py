"""Compute times by roofline, with a few constants of physical meaning.

A matrix product m x k x n is cut into output tiles that multiprocessors do in waves (``search.cost.product``), or
takes the time of its bytes if that is longer. A flash kernel takes its FLOPs at its own rate, and the span of its
longest block on one multiprocessor; an attention that writes its scores is products and memory-bound ops. Memory-bound
ops take their bytes at a fraction of the bandwidth; sums into gradients stream through it. A phase never takes less
than its kernels take to launch.
"""

from __future__ import annotations

from typing import assert_never

from piper_core.arch.chunk import Chunk, Matmul, Work
from piper_core.errors import ConfigError
from piper_core.names import Collective, Phase, Recompute, Region
from profiler.spec import Cluster
from search.cost.base import OVERLAP_SLOWDOWN
from search.cost.collective import GroupShape, collective_seconds, group_shape, send_seconds
from search.cost.product import product_seconds
from search.cost.software import OWN, Software

FLASH1 = 0.25
"""Speed of FlashAttention 1 against 2 (fitted to runs that differ in nothing else; Dao 2023, arXiv 2307.08691, section
4.1, says about half)."""
TRITON = 0.61
"""Speed of the Triton kernel with a bias on scores against FlashAttention 2 (fitted to llm-foundry's runs)."""
VISIBLE_LAUNCH = 0.045
"""Part of a launch that a queue of kernels does not hide: each starts and drains alone (3 us; fitted)."""
UPDATE_BYTES = 30
"""Traffic of Adam on one parameter: gradient, master weight and two moments read in 4 bytes, the last three
written, and the 2-byte weight written."""
WHOLE_LOGITS = 1.5
"""Traffic of a loss over gathered logits against one over a rank's own part, for each logit: parts are gathered, joined
and widened, and the largest is looked for as well (48 bytes, not 32)."""
ACTIVATION_BYTES = 2
ACCUMULATE_BYTES = 8


class RooflineCost:
    """``CostModel`` from a cluster's hardware record alone; all answers are kept."""

    def __init__(
        self, cluster: Cluster, software: Software = OWN, *, overlap_slowdown: float = OVERLAP_SLOWDOWN
    ) -> None:
        self.cluster, self._software = cluster, software
        self._overlap = overlap_slowdown
        # Keyed by identity, quicker than hashing a record; the Work is kept so that its id stays its own.
        self._compute: dict[tuple[int, bool, float, int, bool, int, int], tuple[float, Work]] = {}
        self._collective: dict[tuple[Collective, float, tuple[int, ...]], float] = {}
        self._send: dict[tuple[float, tuple[int, ...], tuple[int, ...]], float] = {}

    @property
    def software(self) -> Software:
        """What the training program does."""
        return self._software

    @property
    def overlap_slowdown(self) -> float:
        """Factor on both sides while compute and communication overlap."""
        return self._overlap

    @property
    def meeting_s(self) -> float:
        """No time: efficiencies of collectives are those of whole runs."""
        return 0.0

    @property
    def host_s(self) -> float:
        """Nothing: where there is a launch at all, another device computes."""
        return 0.0

    @property
    def regular(self) -> bool:
        """Efficiencies grow with sizes."""
        return True

    def compute_s(
        self,
        chunk: Chunk,
        phase: Phase,
        sequences: float,
        tensor: int = 1,
        sequence_parallel: bool = False,
        context: int = 1,
        expert: int = 1,
        recompute: Recompute = Recompute.FULL,
    ) -> float:
        """Return the time of one phase on one rank, without its collectives; B is BI plus BW.

        Raises:
            ConfigError: no sequences, or a degree under 1.
        """
        match phase:
            case Phase.F:
                work = chunk.forward
            case Phase.BI:
                work = chunk.backward_input
            case Phase.BW:
                work = chunk.backward_weight
            case Phase.B:
                degrees = (tensor, sequence_parallel, context, expert)
                return self.compute_s(chunk, Phase.BI, sequences, *degrees) + self.compute_s(
                    chunk, Phase.BW, sequences, *degrees
                )
            case Phase.R:
                match recompute:
                    case Recompute.FULL:
                        less = None if self._software.repeats_layers else chunk.again
                        work = less or chunk.forward
                    case Recompute.SELECTIVE:
                        work = chunk.core
                    case Recompute.NONE:
                        return 0.0
                    case _:
                        assert_never(recompute)
            case Phase.NONE:
                return 0.0
            case _:
                assert_never(phase)
        backward = phase is Phase.BI
        key = (id(work), backward, sequences, tensor, sequence_parallel, context, expert)
        known = self._compute.get(key)
        if known is None:
            whole = self._software.gathers_logits and chunk.region is Region.HEAD and tensor > 1
            sums = phase is Phase.BW
            seconds = self._work_s(work, backward, sequences, tensor, sequence_parallel, context, expert, whole, sums)
            known = self._compute[key] = (seconds, work)
        return known[0]

    def collective_s(self, kind: Collective, bytes: float, ranks: tuple[int, ...]) -> float:
        """Return the time of a collective of ``bytes`` over ``ranks``."""
        key = (kind, bytes, ranks)
        known = self._collective.get(key)
        if known is None:
            shape = group_shape(ranks, self.cluster.gpus_per_node)
            known = self._collective[key] = self.group_collective_s(kind, bytes, shape)
        return known

    def group_collective_s(self, kind: Collective, bytes: float, shape: GroupShape) -> float:
        """Return the time of a collective over a group of a known shape, for bounds that list no ranks."""
        return collective_seconds(self.cluster, kind, bytes, shape)

    def send_s(self, bytes: float, sources: tuple[int, ...], destinations: tuple[int, ...]) -> float:
        """Return the time in which every source sends ``bytes`` to the destination at its position."""
        key = (bytes, sources, destinations)
        known = self._send.get(key)
        if known is None:
            known = self._send[key] = send_seconds(self.cluster, bytes, sources, destinations)
        return known

    def update_s(self, parameters: float) -> float:
        """Return the time of an Adam step over the parameters that one rank owns."""
        return parameters * UPDATE_BYTES / self._bytes_per_s

    @property
    def _bytes_per_s(self) -> float:
        device = self.cluster.device
        return device.memory_bytes_per_s * device.memory_efficiency

    def _work_s(
        self,
        work: Work,
        backward: bool,
        sequences: float,
        tensor: int,
        sequence_parallel: bool,
        context: int,
        expert: int,
        whole: bool,
        sums: bool,
    ) -> float:
        """Time of one phase's kernels, one after another; ``whole``: a loss over the logits of all ranks; ``sums``:
        beside products there are only sums into gradients."""
        if sequences <= 0 or min(tensor, context, expert) < 1:
            raise ConfigError(
                f"sequences must be positive and degrees at least 1, found {sequences} sequences, tensor "
                f"{tensor}, context {context}, expert {expert}"
            )
        device = self.cluster.device
        tokens = sequences / context
        replicas = tensor if sequence_parallel else 1
        if work.matmuls:
            products = sum(self._matmul_s(matmul, tokens, tensor, replicas, expert) for matmul in work.matmuls)
        else:
            flops = device.matmul_flops * device.matmul_efficiency
            moved = work.weight_bytes / tensor / self._bytes_per_s
            products = max(work.matmul_flops * tokens / tensor / flops, moved)
        part = WHOLE_LOGITS if whole else 1 / tensor
        rate = device.memory_bytes_per_s * (device.memory_efficiency if sums else device.elementwise_efficiency)
        traffic = (work.memory_bytes * part + work.replicated_bytes / replicas) * tokens / rate
        total = products + self._attention_s(work, tokens / tensor, backward) + traffic
        return max(total + work.kernels * VISIBLE_LAUNCH * device.launch_s, work.kernels * device.launch_s)

    def _matmul_s(self, matmul: Matmul, tokens: float, tensor: int, replicas: int, expert: int) -> float:
        """Time of one product; experts of the other ranks send their tokens, so each local one has more."""
        local = min(expert, matmul.groups)
        groups = matmul.groups / local
        grow = tokens * local
        if not matmul.split:  # not divided by tensor parallelism, but its tokens are by sequence parallelism
            grow /= replicas
        m, n, k = matmul.m, matmul.n, matmul.k
        accumulates = matmul.tokens == "k"
        if accumulates:
            k *= grow
        else:
            m *= grow
        if matmul.split == "m":
            m /= tensor
        elif matmul.split == "n":
            n /= tensor
        elif matmul.split == "k":
            k /= tensor
        output = ACCUMULATE_BYTES if accumulates else ACTIVATION_BYTES
        moved = groups * ((m * k + k * n) * ACTIVATION_BYTES + m * n * output)
        return max(product_seconds(self.cluster.device, m, n, k, groups), moved / self._bytes_per_s)

    def _attention_s(self, work: Work, share: float, backward: bool) -> float:
        """Time of an attention kernel over ``share`` of a sequence's heads and queries."""
        if not work.attention_flops or not share:
            return 0.0
        device = self.cluster.device
        match work.attention_kernel:
            case "flash2":
                efficiency = device.attention_backward_efficiency if backward else device.attention_efficiency
            case "flash1":
                efficiency = device.attention_backward_efficiency if backward else device.attention_efficiency
                efficiency *= FLASH1
            case "triton":
                efficiency = device.attention_backward_efficiency if backward else device.attention_efficiency
                efficiency *= TRITON
            case "unfused" | "eager":
                overhead = 1.0 + device.inner_overhead / work.attention_inner if work.attention_inner else 1.0
                efficiency = device.matmul_efficiency / overhead
            case _:
                assert_never(work.attention_kernel)
        flops = work.attention_flops * share + work.attention_span * device.multiprocessors
        return flops / (device.matmul_flops * efficiency)
