"""The parameters of one rank, stage by stage, in the buckets of the DAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from piper_core.errors import ConfigError
from piper_core.frontend.cut import Cut
from piper_core.frontend.shares import Share
from piper_core.ir.dag import Dag
from piper_core.passes.gradient_sync import bucket_ranks
from piper_core.passes.update import tie_groups
from piper_core.runtime.buffers import Bucket, Run
from piper_core.runtime.model import ModelSource, StageModule
from piper_core.runtime.tables import pieces_by_chunk


@dataclass(frozen=True, slots=True)
class StageStorage:
    """What a rank holds of a stage: buckets by their index in the DAG, buffers by placeholder, shares of parameters by
    name, of which gradients the tensor group has parts."""

    stage: int
    buckets: dict[int, Bucket]
    buffers: dict[str, Tensor]
    shares: dict[str, Share]
    summed: frozenset[str]

    @property
    def runs(self) -> list[Run]:
        return [run for bucket in self.buckets.values() for run in bucket.runs]


def stage_storage(
    dag: Dag, cut: Cut, source: ModelSource, stage: int, rank: int, place: Mapping[str, int]
) -> StageStorage:
    """Build one stage of one rank.

    Raises:
        ConfigError: the strategy was compiled for other parameters than the model has.
    """
    names: dict[str, tuple[str, ...]] = {}
    for placeholder, name in cut.joint.parameters.items():
        names[name] = (*names.get(name, ()), placeholder)
    chunks = _chunks(dag, stage)
    module = source.stage([dag.chunks[c] for c in chunks], place)
    tensor = source.degrees.tensor
    tied = {source.canonical(p.name): p.tie for c in dag.chunks for p in c.parameters if p.tie in tie_groups(dag)}
    first = _first_stages(dag, source)
    buckets: dict[int, Bucket] = {}
    seen: set[str] = set()
    piece_of = pieces_by_chunk(dag, cut)

    def placeholders(name: str, users: list[int], zero: int) -> tuple[str, ...]:
        """Return what graphs call a parameter: all of them, or those of a bucket that comes and goes."""
        if zero < 2:
            return names[name]
        read = {each for chunk in users for each in cut.pieces[piece_of[chunk]].parameters}
        return tuple(each for each in names[name] if each in read)

    for index, held in _parameters(dag, stage):
        bucket = dag.buckets[index]
        ranks = next(group for group in bucket_ranks(dag, bucket) if rank in group)
        zero = dag.states[bucket.state].zero_stage if len(ranks) > 1 else 0
        users: dict[
            str, list[int]
        ] = {}  # chunks of each parameter; a second copy on a stage is one only where it must be
        for chunk, name in held:
            users.setdefault(source.canonical(name), []).append(chunk)
        mine = [each for each in users if each not in seen or zero >= 2]  # a copy may be the same tensor, if it stays
        missing = [each for each in mine if each not in module.parameters or each not in names]
        if missing:
            raise ConfigError(
                f"the strategy was compiled for a model with a parameter {missing[0]!r}, which this one has not; "
                "compile it for this model"
            )
        alone = [[each] for each in mine if each in tied]
        rest = [each for each in mine if each not in tied]
        runs = []
        for members in (*([rest] if rest else []), *alone):
            counted = {}
            for each in members:
                whole = not any(axis == "tensor" for axis, _ in module.shares[each])
                factor = 1.0 / tensor if whole else 1.0
                factor = factor if zero else factor / len(ranks)
                counted[each] = factor if first.get(each, stage) == stage and each not in seen else 0.0
            values = [(placeholders(each, users[each], zero), each, module.parameters[each]) for each in members]
            runs.append(Run(values, ranks, ranks.index(rank), zero, tied=members[0] in tied, counted=counted))
        seen |= set(mine)
        buckets[index] = Bucket(index, runs, each=zero >= 2)
    left = set(module.parameters) - seen
    if left:
        raise ConfigError(
            f"the model has a parameter {sorted(left)[0]!r} that the strategy was not compiled for; compile it "
            "for this model"
        )
    return StageStorage(stage, buckets, _buffers(cut, module), module.shares, frozenset(module.summed))


def _chunks(dag: Dag, stage: int) -> list[int]:
    mine = dag.compute & (dag.nodes.stage == stage)
    return sorted(set(dag.nodes.chunk[mine].tolist()))


def _parameters(dag: Dag, stage: int) -> Iterator[tuple[int, Sequence[tuple[int, str]]]]:
    """Yield the buckets of a stage and their parameters, (chunk, name), as :func:`make_buckets` dealt them out."""
    left: dict[tuple[int, bool], list[tuple[str, int]]] = {}
    state_of = dict(zip(dag.nodes.chunk[dag.compute].tolist(), dag.nodes.state[dag.compute].tolist(), strict=True))
    for index, bucket in enumerate(dag.buckets):
        if bucket.stage != stage:
            continue
        held = []
        for chunk, numel in bucket.parts:
            state = dag.states[state_of[chunk]]
            key = (chunk, bucket.expert)
            if key not in left:
                left[key] = [
                    (p.name, p.numel // (state.tensor_degree if p.tensor else 1) // (state.expert_degree if e else 1))
                    for p in dag.chunks[chunk].parameters
                    if (e := p.expert and state.expert_degree > 1) == bucket.expert
                ]
            while numel > 0:
                name, size = left[key].pop(0)
                numel -= size
                held.append((chunk, name))
        yield index, held


def _first_stages(dag: Dag, source: ModelSource) -> dict[str, int]:
    """Return, for each parameter that lies on several stages, the first of them, which counts it in the norm."""
    found: dict[str, int] = {}
    stage_of = dict(zip(dag.nodes.chunk[dag.compute].tolist(), dag.nodes.stage[dag.compute].tolist(), strict=True))
    for index, chunk in enumerate(dag.chunks):
        for parameter in chunk.parameters:
            if parameter.tie:
                stage = max(0, stage_of[index])
                name = source.canonical(parameter.name)
                found[name] = min(found.get(name, stage), stage)
    return found


def _buffers(cut: Cut, module: StageModule) -> dict[str, Tensor]:
    return {p: module.buffers[name] for p, name in cut.joint.buffers.items() if name in module.buffers}
