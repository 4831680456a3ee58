"""A strategy as a person asks for it: the degrees that they name, the rest inferred, and what does not go refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_core.arch.chunk import AttentionKernel, Fusion, LossWidth
from piper_core.arch.contract import check_degree, legal_degrees
from piper_core.arch.record import Architecture
from piper_core.directives.stage import holds_nothing
from piper_core.errors import ConfigError
from piper_core.names import Recompute, ShardKind, Sync
from piper_core.program.strategy import MAX_GPUS
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Layout
from profiler.spec import Cluster
from search.cost.software import OWN, Software
from search.space import OUTERS, Configuration, divisors

Dtype = Literal["bf16", "fp16"]
POLICIES = (str(Recompute.NONE), str(Recompute.SELECTIVE), str(Recompute.FULL))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels run what decides times and memory most (see ``model_chunks``); ``dtype`` is that of weights and
    activations."""

    attention: AttentionKernel = "flash2"
    norm: Fusion = "fused"
    activation: Fusion | None = None
    dtype: Dtype = "bf16"
    dropout: bool = False
    loss: LossWidth = "fp32"


@dataclass(frozen=True, slots=True)
class Request:
    """A strategy to predict. What is None is inferred, and 1 where nothing says otherwise.

    ``dp`` counts the ranks that divide the batch; experts lie inside it. ``recompute`` is none, selective, full, or a
    number of layers of each stage. ``layers`` is layers per stage, or ``even`` or ``balanced`` (by time, embedding and
    head counted). ``bucket_mib`` is the size of gradient buckets: about one layer where None, 0 for one bucket a stage.
    ``outer`` is the outermost axis of the mesh on the topology, pp or dp; ``prefetch`` how many gathers of parameters
    may run ahead of compute. ``software`` is what trains it: this project's own runtime where nothing is said.
    """

    architecture: Architecture
    cluster: Cluster
    gpus: int | None = None
    global_batch: int | None = None
    seq_len: int = 4096
    micro_batch: int | None = None
    num_microbatches: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int = 1
    cp: int | None = None
    virtual_stages: int | None = None
    zero: int = 0
    schedule: str | None = None
    recompute: str = "none"
    sequence_parallel: bool = False
    kernels: Kernels = Kernels()
    sync: Sync = Sync.GLOBAL_NORM
    layers: tuple[int, ...] | str = "even"
    bucket_mib: int | None = None
    outer: str = OUTERS[0]
    prefetch: int = 1
    software: Software = OWN

    def resolve(self) -> Configuration:
        """Return the configuration that this asks for.

        ZeRO without ranks to shard over is plain: its stage becomes 0.

        Raises:
            ConfigError: numbers that contradict each other or the model; says which would do.
            ScheduleError: degrees that the schedule is not defined for.
        """
        self._check_ranges()
        pp, tp, dp, cp = self._degrees()
        b, m = self._batch(dp)
        name, v = self._schedule(pp)
        self._check_model(pp, tp, dp, cp)
        get_family(name).check(pp, m, v)
        layout = get_family(name).layout
        zero = self.zero if dp * cp > 1 or layout is Layout.BIDIRECTIONAL else 0
        if layout is Layout.BIDIRECTIONAL and (zero > 1 or self.architecture.tied):
            what = f"ZeRO-{zero}" if zero > 1 else f"the tied embedding of {self.architecture.name}"
            raise ConfigError(f"{what} needs each stage on one row, and {name} has it on two; use dualpipev")
        config = Configuration(
            pp, tp, dp, self.ep, name, v, zero, b, m, self.recompute, self.sequence_parallel and tp > 1,
            self.layers if isinstance(self.layers, str) else "even", cp, outer=self.outer, prefetch=self.prefetch,
        )  # fmt: skip
        self._check_layers(config.stages)
        return config

    def _check_ranges(self) -> None:
        counts = ("gpus", "global_batch", "seq_len", "micro_batch", "num_microbatches", "tp", "pp", "dp", "ep", "cp",
                  "virtual_stages", "prefetch")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, found {value}")
        if self.outer not in OUTERS:
            raise ConfigError(f"outer must be {' or '.join(OUTERS)}, found {self.outer[:40]!r}")
        if self.zero not in range(4):
            raise ConfigError(f"zero must be 0, 1, 2 or 3, found {self.zero}")
        if self.recompute not in POLICIES and not (self.recompute.isascii() and self.recompute.isdecimal()):
            raise ConfigError(
                f"recompute must be {', '.join(POLICIES)} or a number of layers of each stage, "
                f"found {self.recompute[:40]!r}"
            )
        if self.recompute.isdecimal() and not 1 <= int(self.recompute) <= self.architecture.layers:
            raise ConfigError(
                f"recompute of {self.recompute} layers of each stage: give 1 to {self.architecture.layers}, or none"
            )
        if self.seq_len > self.architecture.max_seq:
            raise ConfigError(
                f"a sequence of {self.seq_len} is longer than {self.architecture.name} allows: "
                f"at most {self.architecture.max_seq}"
            )

    def _degrees(self) -> tuple[int, int, int, int]:
        """Return (pp, tp, dp, cp): what is missing from the number of GPUs and the others."""
        given = {name: value for name in ("pp", "tp", "dp", "cp") if (value := getattr(self, name)) is not None}
        known = 1
        for value in given.values():
            known *= value
        words = " x ".join(f"{name} {value}" for name, value in given.items()) or "1"
        gpus = self.gpus if self.gpus is not None else known
        if gpus > MAX_GPUS:
            raise ConfigError(f"{gpus} GPUs are more than {MAX_GPUS}, the most that a strategy may have")
        if gpus % known:
            below, above = gpus // known * known, (gpus // known + 1) * known
            near = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                f"{gpus} GPUs are not divisible by {words} = {known}; {near} GPUs would do, or degrees whose product "
                f"is one of {_listed(divisors(gpus))}"
            )
        if "dp" not in given:
            given["dp"] = gpus // known
        elif gpus > known:
            free = [name for name in ("pp", "tp", "cp") if name not in given]
            if len(free) != 1:
                what = f"say which of {', '.join(free)} takes the rest" if free else "change one of them"
                raise ConfigError(f"{words} = {known} of {gpus} GPUs leave a factor of {gpus // known}; {what}")
            given[free[0]] = gpus // known
        return given.get("pp", 1), given.get("tp", 1), given["dp"], given.get("cp", 1)

    def _batch(self, dp: int) -> tuple[int, int]:
        """Return (microbatch, number of microbatches)."""
        b, m = self.micro_batch, self.num_microbatches
        if self.global_batch is None:
            if m is None:
                raise ConfigError("give the global batch, or microbatch and number of microbatches")
            return b or 1, m
        if self.global_batch % dp:
            below = self.global_batch // dp * dp
            near = f"{below} or {below + dp}" if below else str(dp)
            raise ConfigError(
                f"global batch {self.global_batch} is not divisible by dp {dp}; {near} would do, or dp one of "
                f"{_listed(divisors(self.global_batch))}"
            )
        share = self.global_batch // dp
        if b is None and m is None:
            b = 1
        name, value = ("micro_batch", b) if b is not None else ("num_microbatches", m)
        if share % (value or 1):
            raise ConfigError(
                f"global batch {self.global_batch} gives each of {dp} data ranks {share} sequences, which are not "
                f"divisible by {name} {value}; {_listed(divisors(share))} would do"
            )
        b, m = (b, share // b) if b is not None else (share // (m or 1), m or 1)
        if self.num_microbatches not in (None, m):
            raise ConfigError(
                f"global batch {self.global_batch} = dp {dp} x micro_batch {b} x {m} microbatches, "
                f"not {self.num_microbatches}; leave one of them out"
            )
        return b, m

    def _schedule(self, pp: int) -> tuple[str, int]:
        """Return the family and its virtual stages, the least where none are given."""
        name = self.schedule or ("1f1b" if (self.virtual_stages or 1) == 1 else "interleaved_1f1b")
        return name, self.virtual_stages or get_family(name).virtual_stages(pp)[0]

    def _check_model(self, pp: int, tp: int, dp: int, cp: int) -> None:
        arch = self.architecture
        kind = ShardKind.SEQUENCE if self.sequence_parallel else ShardKind.TENSOR
        check_degree(arch, kind, tp, self.seq_len)
        check_degree(arch, ShardKind.CONTEXT, cp, self.seq_len)
        if self.sequence_parallel and self.seq_len % (tp * cp):
            raise ConfigError(f"a sequence of {self.seq_len} is not divisible by tp {tp} x cp {cp}")
        legal = [d for d in legal_degrees(arch, ShardKind.EXPERT, self.seq_len) if dp % d == 0]
        if self.ep not in legal:
            raise ConfigError(
                f"ep {self.ep} must divide dp {dp} and the {arch.experts} experts of {arch.name}; "
                f"{_listed(legal)} would do"
                if arch.experts
                else f"ep {self.ep}: {arch.name} has no experts; leave it out"
            )
        if pp > arch.layers:
            raise ConfigError(f"pp {pp} is more than the {arch.layers} layers of {arch.name}")

    def _check_layers(self, stages: int) -> None:
        layers = self.architecture.layers
        if isinstance(self.layers, str):
            if self.layers not in ("even", "balanced"):
                raise ConfigError(f"layers must be even, balanced or a list of numbers, found {self.layers[:40]!r}")
            if stages > layers:
                raise ConfigError(f"{stages} stages are more than the {layers} layers of {self.architecture.name}")
        elif len(self.layers) != stages or sum(self.layers) != layers or holds_nothing(self.layers):
            raise ConfigError(
                f"layers per stage {','.join(map(str, self.layers))[:60]} are {len(self.layers)} numbers with sum "
                f"{sum(self.layers)}; give {stages} of at least 1 with sum {layers}"
            )


def _listed(values: list[int], most: int = 12) -> str:
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")
