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
    module = source.stage([dag.chunks[c] for c in _chunks(dag, stage)], place)
    builder = _Builder(dag, cut, source, module, stage, rank)
    buckets = {index: builder.bucket(index, held) for index, held in _parameters(dag, stage)}
    left = set(module.parameters) - builder.seen
    if left:
        raise ConfigError(
            f"the model has a parameter {sorted(left)[0]!r} that the strategy was not compiled for; compile it "
            "for this model"
        )
    return StageStorage(stage, buckets, _buffers(cut, module), module.shares, frozenset(module.summed))


class _Builder:
    """The buckets of one stage of one rank, one after another; ``seen`` are the parameters that have one."""

    def __init__(self, dag: Dag, cut: Cut, source: ModelSource, module: StageModule, stage: int, rank: int) -> None:
        self.dag, self.cut, self.source, self.module, self.stage, self.rank = dag, cut, source, module, stage, rank
        self.seen: set[str] = set()
        self.names: dict[str, tuple[str, ...]] = {}
        for placeholder, name in cut.joint.parameters.items():
            self.names[name] = (*self.names.get(name, ()), placeholder)
        ties = tie_groups(dag)
        _check_ties(dag, ties)
        self.tied = {source.canonical(p.name) for chunk in dag.chunks for p in chunk.parameters if p.tie in ties}
        self.first = _first_stages(dag, source)
        self.piece_of = pieces_by_chunk(dag, cut)

    def bucket(self, index: int, held: Sequence[tuple[int, str]]) -> Bucket:
        """Return a bucket of parameters (chunk, name).

        A second copy of a tied parameter on one stage is the same tensor, unless buckets come and go.
        """
        bucket = self.dag.buckets[index]
        ranks = next(group for group in bucket_ranks(self.dag, bucket) if self.rank in group)
        zero = self.dag.states[bucket.state].zero_stage if len(ranks) > 1 else 0
        users: dict[str, list[int]] = {}
        for chunk, name in held:
            users.setdefault(self.source.canonical(name), []).append(chunk)
        mine = [each for each in users if each not in self.seen or zero >= 2]
        missing = [each for each in mine if each not in self.module.parameters or each not in self.names]
        if missing:
            raise ConfigError(
                f"the strategy was compiled for a model with a parameter {missing[0]!r}, which this one has not; "
                "compile it for this model"
            )
        rest = [each for each in mine if each not in self.tied]
        runs = []
        for members in (*([rest] if rest else []), *([each] for each in mine if each in self.tied)):
            values = [
                (self._placeholders(each, users[each], zero), each, self.module.parameters[each]) for each in members
            ]
            counted = {each: self._counted(each, len(ranks), zero) for each in members}
            tied = members[0] in self.tied
            runs.append(Run(values, ranks, ranks.index(self.rank), zero, tied=tied, counted=counted))
        self.seen |= set(mine)
        return Bucket(index, runs, each=zero >= 2)

    def _placeholders(self, name: str, users: list[int], zero: int) -> tuple[str, ...]:
        """Return what graphs call a parameter: all of them, or those of the users of a bucket that comes and goes."""
        if zero < 2:
            return self.names[name]
        read = {each for chunk in users for each in self.cut.pieces[self.piece_of[chunk]].parameters}
        return tuple(each for each in self.names[name] if each in read)

    def _counted(self, name: str, ranks: int, zero: int) -> float:
        """Return the part of a gradient's square that this rank adds to the global norm."""
        if name in self.seen or self.first.get(name, self.stage) != self.stage:
            return 0.0
        whole = not any(axis == "tensor" for axis, _ in self.module.shares[name])
        return (1.0 / self.source.degrees.tensor if whole else 1.0) / (1 if zero else ranks)


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


def _check_ties(dag: Dag, ties: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Refuse copies of a tied parameter of which one is sharded with its gradient and the other is not."""
    state_of = dict(zip(dag.nodes.chunk[dag.compute].tolist(), dag.nodes.state[dag.compute].tolist(), strict=True))
    for name, copies in ties.items():
        stages = {dag.states[state_of[chunk]].zero_stage for chunk, _ in copies}
        if len({stage >= 2 for stage in stages}) > 1:
            raise ConfigError(
                f"tied parameter {name} is under ZeRO-{min(stages)} on one stage and ZeRO-{max(stages)} on another; "
                "replicate both stages alike"
            )


def _buffers(cut: Cut, module: StageModule) -> dict[str, Tensor]:
    return {p: module.buffers[name] for p, name in cut.joint.buffers.items() if name in module.buffers}
