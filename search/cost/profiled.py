"""A cost model that reads a profile, and takes the roofline where nothing was measured.

Every answer is marked: *measured*, *fitted* from measurements, or *preset*. Chunks are those of the profile's model;
collectives, messages and updates are the machine's. Not modelled: ranks on a node beyond what was profiled slow each
other only through ``sharing``, an equal share of the cores at all times, which is too slow where ranks wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache
from math import inf
from typing import Literal

from piper_core.arch.chunk import Chunk, ModelChunks, Saved, Work
from piper_core.arch.contract import accepted_kinds, contract
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.names import Collective, Phase, Recompute, Region, ShardKind
from profiler.fit import Answer, Chunks, Meetings, Origin, Transfers, Updates, overlap_factor
from profiler.record import SEND, Profile, Site, shared
from profiler.store import check_model, model_digest
from search.cost.base import CostModel
from search.cost.collective import group_shape
from search.cost.software import Software

Level = Literal["low", "middle", "high"]
"""Which end of every answer's interval is given: all low, all in the middle, or all high."""
PRESET_DOUBT = 0.5
"""Relative uncertainty of a preset's answer on a machine that was otherwise measured."""
COUNT_BYTES = 8
"""Bytes of one number of tokens, of which a rank sends one at least to each other: what takes time is the latency."""
TOGETHER = {"compute": "compute and compute", "transfer": "compute and transfer"}
_BYTES = ("output_bytes", "hidden_bytes", "column_bytes", "token_bytes", "kv_bytes", "qkvo_bytes", "workspace_bytes")


class ProfiledCost:
    """``CostModel`` from a profile, and ``preset`` for the rest; ``ranks`` processes fill nodes of ``gpus_per_node``.

    Raises:
        ConfigError: the profile is of another model.
    """

    def __init__(
        self, profile: Profile, preset: CostModel, architecture: Architecture, seq_len: int, *, ranks: int = 1,
        gpus_per_node: int = 8, level: Level = "middle", where: str = "the profile",
    ) -> None:  # fmt: skip
        check_model(profile, architecture.name, model_digest(architecture), where)
        self.profile, self.preset, self.seq_len, self.level = profile, preset, seq_len, level
        self._per_node = gpus_per_node
        self._chunks, self._transfers, self._updates = Chunks(profile), Transfers(profile.transfers), Updates(profile)
        self._meetings = Meetings(profile)
        self.sharing = self._sharing(min(ranks, gpus_per_node))
        crossed = overlap_factor(profile, TOGETHER["transfer"])
        self._overlap = preset.overlap_slowdown if crossed is None else crossed
        self._asked: dict[tuple[object, ...], float] = {}
        self.origins: dict[str, Counter[Origin]] = {name: Counter() for name in ("chunks", "transfers", "updates")}

    def _sharing(self, ranks: int) -> float:
        """Return how much slower chunks are than alone, with ``ranks`` on the machine."""
        if ranks < 2:
            return 1.0
        beside = overlap_factor(self.profile, TOGETHER["compute"]) or 1.0
        crowd = ranks * self.profile.machine.threads / self.profile.machine.count
        return beside * max(1.0, crowd) if self.profile.machine.kind == "cpu" else beside

    @property
    def software(self) -> Software:
        """What the training program does."""
        return self.preset.software

    @property
    def overlap_slowdown(self) -> float:
        """Factor on both sides while compute and communication overlap: the machine's own where it was measured."""
        return self._overlap

    @property
    def host_s(self) -> float:
        """Seconds that starting and finishing a message take of the thread that computes; 0 where not measured."""
        taken = self.profile.dispatch
        return 0.0 if taken is None else self._end(Answer.of(taken))

    @property
    def meeting_s(self) -> float:
        """Seconds that ranks lose at a collective outside chunks, having computed for long; 0 where not measured."""
        return self._end(self._meetings(inf))

    @property
    def regular(self) -> bool:
        """What was measured keeps no law: a larger microbatch may be too much for a cache."""
        return False

    def compute_s(
        self, chunk: Chunk, phase: Phase, sequences: float, tensor: int = 1, sequence_parallel: bool = False,
        context: int = 1, expert: int = 1, recompute: Recompute = Recompute.FULL,
    ) -> float:  # fmt: skip
        """Return the time of one phase on one rank, without its collectives but with the wait for their slowest rank
        and for the counts of what experts get.
        BI and BW are at most B together, so that bounds made of them hold.

        Raises:
            ConfigError: as the preset's.
        """
        key = (chunk.region, id(chunk.forward), phase, sequences, tensor, sequence_parallel, context, expert, recompute)
        known = self._asked.get(key)
        if known is None:
            degrees = Degrees(tensor, sequence_parallel and tensor > 1, expert, context)
            known = self._compute(chunk, phase, sequences, degrees, recompute) * self.sharing
            times = _meetings(chunk.region, phase, degrees, recompute, self.software)
            if times:
                known += times * self._end(self._meetings(known)) + self._counts_s(chunk, phase, degrees)
            self._asked[key] = known
        return known

    def _counts_s(self, chunk: Chunk, phase: Phase, d: Degrees) -> float:
        """Return what ranks take to tell each other how many tokens each expert gets, before they send them; in R they
        know."""
        if d.expert < 2 or chunk.region is not Region.EXPERT or phase is not Phase.F:
            return 0.0
        ranks = tuple(range(0, d.expert * d.tensor, d.tensor))
        return self.collective_s(Collective.ALL_TO_ALL, float(COUNT_BYTES * d.expert), ranks)

    def _compute(self, chunk: Chunk, phase: Phase, sequences: float, d: Degrees, recompute: Recompute) -> float:
        def preset(site: Site) -> float:
            e = site.degrees
            return self.preset.compute_s(
                chunk, site.phase, site.micro_batch, e.tensor, e.sequence, e.context, e.expert, site.policy
            )

        def ask(each: Phase) -> Answer:
            policy = recompute if each is Phase.R else Recompute.NONE
            expected = self.preset.compute_s(
                chunk, each, sequences, d.tensor, d.sequence, d.context, d.expert, recompute
            )
            if each is Phase.NONE or (policy is Recompute.NONE and each is Phase.R):
                return Answer(0.0, 0.0, 0.0, Origin.MEASURED)
            found = None
            if float(sequences).is_integer():
                site = Site(chunk.region, each, int(sequences), self.seq_len, shared(chunk.region, d), policy)
                if not self._present(site):
                    return Answer(0.0, 0.0, 0.0, Origin.MEASURED)
                found = self._chunks(site, preset)
            return found or _preset(expected)

        if phase not in (Phase.BI, Phase.BW):
            return self._take("chunks", ask(phase))
        whole, first, second = (self._end(ask(each)) for each in (Phase.B, Phase.BI, Phase.BW))
        part = min(1.0, whole / (first + second)) if first + second else 1.0
        return self._take("chunks", ask(phase)) * part

    def _present(self, site: Site) -> bool:
        """Say whether a site exists: a profile that has the region in this shape lists each of its phases that does
        anything."""
        whole = replace(site, phase=Phase.F, policy=Recompute.NONE)
        return site in self.profile.sites or whole not in self.profile.sites

    def collective_s(self, kind: Collective, bytes: float, ranks: tuple[int, ...]) -> float:
        """Return the time of a collective of ``bytes`` over ``ranks``."""
        if len(ranks) < 2 or bytes <= 0 or kind is Collective.NONE:
            return 0.0
        key = (kind, bytes, ranks)
        known = self._asked.get(key)
        if known is None:
            shape = group_shape(ranks, self._per_node)
            found = self._transfers(kind.name.lower(), bytes, shape.size, shape.nodes)
            answer = found or _preset(self.preset.collective_s(kind, bytes, ranks))
            known = self._asked[key] = self._take("transfers", answer)
        return known

    def send_s(self, bytes: float, sources: tuple[int, ...], destinations: tuple[int, ...]) -> float:
        """Return the time in which every source sends ``bytes`` to the destination at its position."""
        key = (SEND, bytes, sources, destinations)
        known = self._asked.get(key)
        if known is None:
            pairs = zip(sources, destinations, strict=True)
            nodes = 1 if all(a // self._per_node == b // self._per_node for a, b in pairs) else 2
            found = self._transfers(SEND, bytes, 2, nodes)
            answer = found or _preset(self.preset.send_s(bytes, sources, destinations))
            known = self._asked[key] = self._take("transfers", answer)
        return known

    def update_s(self, parameters: float) -> float:
        """Return the time of clearing gradients, the norm and the optimiser step over a rank's own parameters."""
        key = ("update", parameters)
        known = self._asked.get(key)
        if known is None:
            answer = self._updates(parameters) or _preset(self.preset.update_s(parameters))
            known = self._asked[key] = self._take("updates", answer)
        return known

    def _take(self, what: str, answer: Answer) -> float:
        self.origins[what][answer.origin] += 1
        return self._end(answer)

    def _end(self, answer: Answer) -> float:
        return {"low": answer.low_s, "middle": answer.seconds, "high": answer.high_s}[self.level]

    def says(self) -> str:
        """Return in words where the answers so far came from."""
        parts = []
        for what, counts in self.origins.items():
            found = [f"{counts[origin]} {origin}" for origin in Origin if counts[origin]]
            parts += [f"{what} {', '.join(found)}"] if found else []
        return f"costs: {'; '.join(parts)}"

    def to_data(self) -> dict[str, dict[str, int]]:
        """Return how many distinct answers came from where."""
        return {
            what: {str(origin): counts[origin] for origin in Origin if counts[origin]}
            for what, counts in self.origins.items()
        }


@lru_cache(maxsize=4096)
def _meetings(region: Region, phase: Phase, d: Degrees, recompute: Recompute, software: Software) -> int:
    """Return how often ranks exchange after computing inside a chunk, where each waits for the slowest: once, and where
    tokens come to experts and go back twice."""
    kinds = [ShardKind.CONTEXT] if d.context > 1 else []
    if phase is not Phase.R or recompute is not Recompute.SELECTIVE:
        kinds += [ShardKind.SEQUENCE if d.sequence else ShardKind.TENSOR] if d.tensor > 1 else []
        kinds += [ShardKind.EXPERT] if d.expert > 1 and region is Region.EXPERT else []
    exchanging = [
        kind for kind in kinds if kind in accepted_kinds(region)
        and any(software.exposed(region, phase, each.collective) for each in contract(region, kind, phase))
    ]  # fmt: skip
    return 0 if not exchanging else 2 if ShardKind.EXPERT in exchanging else 1


def _preset(seconds: float) -> Answer:
    return Answer(seconds, seconds / (1 + PRESET_DOUBT), seconds * (1 + PRESET_DOUBT), Origin.PRESET)


@lru_cache(maxsize=64)
def widened(model: ModelChunks, dtype_bytes: int) -> ModelChunks:
    """Return a chunk table with weights and activations of ``dtype_bytes`` each instead of its own."""
    if dtype_bytes == model.dtype_bytes:
        return model
    by = dtype_bytes / model.dtype_bytes
    if by < 1:
        raise ConfigError(f"activations of {dtype_bytes} bytes are narrower than those of the table")
    chunks = tuple(_wider(chunk, by) for chunk in model.chunks)
    edges = tuple((a, b, size * by) for a, b, size in model.edges)
    return replace(model, chunks=chunks, edges=edges, dtype_bytes=dtype_bytes)


def _wider(chunk: Chunk, by: float) -> Chunk:
    made = {name: getattr(chunk, name) * by for name in _BYTES}
    for field in fields(Chunk):
        value = getattr(chunk, field.name)
        if isinstance(value, Saved):
            made[field.name] = Saved(value.sharded * by, value.replicated * by)
        elif isinstance(value, Work):
            made[field.name] = _wider_work(value, by)
    return replace(chunk, **made)


@lru_cache(maxsize=4096)
def _wider_work(work: Work, by: float) -> Work:
    return replace(
        work, memory_bytes=work.memory_bytes * by, replicated_bytes=work.replicated_bytes * by,
        weight_bytes=work.weight_bytes * by,
    )  # fmt: skip
