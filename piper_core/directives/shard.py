"""shard: divide chunks over ranks, with the collectives that the region's contract asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from piper_core.arch.contract import accepted_kinds, contract, payload_bytes
from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import (
    check_fields,
    read_devices,
    read_filter,
    read_text,
    resolve,
    rows_inside,
    write_devices,
)
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, Ints, Mask, Nodes
from piper_core.ir.edit import append, attached, compute_table, distinct, splice, update_states, whole_chunks
from piper_core.ir.filter import Filter
from piper_core.ir.shard_state import Groups, Ranks, ShardState
from piper_core.names import NodeKind, Phase, Region, Role, ShardKind

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

_ORDER = (ShardKind.EXPERT, ShardKind.TENSOR, ShardKind.SEQUENCE, ShardKind.CONTEXT)
"""Outermost first: tokens are dispatched before tensors are gathered."""
_PHASES = (Phase.F, Phase.B, Phase.BI, Phase.BW)


@dataclass(frozen=True, slots=True)
class ShardEdit:
    """Compute nodes to shard (mask over n), the groups of each row, and the stream of the collectives."""

    mask: Mask
    groups: Groups
    directive: Shard


@dataclass(frozen=True, slots=True)
class Shard(Directive[ShardEdit]):
    """Divide the matched chunks over groups of ranks: experts, tensors (Megatron), tensors with sequence-parallel
    activations, or the sequence (context).

    Rewrite::

        u -> expert -> v          becomes   u -> all_to_all -> expert -> all_to_all -> v
        attention -> mlp (tensor)   becomes   attention -> all_reduce -> mlp -> all_reduce

    ``stream`` other than ``compute`` lets the collectives overlap with the other actions of an overlap group.
    """

    op: ClassVar[str] = "shard"
    filter: Filter
    devices: Groups = ()
    stream: str | None = None
    kind: ShardKind = ShardKind.EXPERT
    method: Literal["ring", "all_to_all"] = "ring"
    regather: bool = True
    axis: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Shard:
        axis = read_text(data, "axis", None)
        where = "axis" if axis is not None else "device" if "device" in data and "devices" not in data else "devices"
        check_fields(data, ("filter", where), ("stream", "kind", "method", "regather"))
        kind = data.get("kind", "expert")
        if kind not in tuple(map(str, ShardKind)):
            raise DirectiveError(f"unknown kind {kind!r}"[:60], expected="one of " + ", ".join(ShardKind))
        method = data.get("method", "ring")
        if method not in ("ring", "all_to_all"):
            raise DirectiveError(f"unknown method {method!r}"[:60], expected="ring or all_to_all")
        if "method" in data and kind != ShardKind.CONTEXT:
            raise DirectiveError("method is for kind context", hint="drop it")
        regather = data.get("regather", True)
        if not isinstance(regather, bool):
            raise DirectiveError("regather has the wrong type", expected="true or false", found=repr(regather)[:40])
        devices = () if axis is not None else read_devices(data)
        return cls(read_filter(data), devices, read_text(data, "stream", None), ShardKind(kind), method, regather, axis)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"op": self.op, "filter": self.filter.to_data()}
        data |= {"axis": self.axis} if self.axis else {"devices": write_devices(self.devices)}
        data |= {"stream": self.stream} if self.stream else {}
        data |= {"kind": str(self.kind)} if self.kind is not ShardKind.EXPERT else {}
        data |= {"method": self.method} if self.kind is ShardKind.CONTEXT and self.method != "ring" else {}
        return data | ({} if self.regather else {"regather": False})

    def check(self, dag: Dag, mesh: Mesh | None = None) -> ShardEdit:
        groups = resolve(self.devices, self.axis, mesh)
        mask = whole_chunks(self.filter, dag, self.op)
        if (dag.nodes.group[mask] < 0).any():
            raise DirectiveError(f"filter {self.filter} matches compute that is not placed", hint="place it first")
        if dag.buckets:
            raise DirectiveError("shard comes after replicate", expected="shard before replicate")
        for chunk in distinct(dag.nodes.chunk[mask]).tolist():
            region = dag.chunks[chunk].region
            if self.kind not in accepted_kinds(region):
                raise DirectiveError(
                    f"filter {self.filter} matches {dag.chunks[chunk].name}, which cannot be sharded by {self.kind}",
                    expected=f"{region} takes " + ", ".join(sorted(accepted_kinds(region))) or "none",
                    hint='narrow the filter, such as {"REGION": "expert"}' if self.kind is ShardKind.EXPERT else "",
                )
        degree, unit = len(groups[0]), dict(dag.model.units).get(str(self.kind), 0)
        if unit and unit % degree:
            legal = [d for d in range(1, min(unit, 4096) + 1) if unit % d == 0]
            raise DirectiveError(
                f"{self.kind} degree {degree} does not divide the model",
                expected="one of " + ", ".join(map(str, legal[:12])),
            )
        for group in distinct(dag.nodes.group[mask]).tolist():
            rows_inside(groups, dag.groups[group], self.kind)
        for index in distinct(dag.nodes.state[mask]).tolist():
            self._taken(dag.states[index], groups)
        return ShardEdit(mask, groups, self)

    def _taken(self, state: ShardState, groups: Groups) -> None:
        """Refuse a second sharding of the same kind, and groups that do not form a product with the others."""
        held = {
            ShardKind.TENSOR: state.tensor,
            ShardKind.SEQUENCE: state.tensor,
            ShardKind.EXPERT: state.expert,
            ShardKind.CONTEXT: state.context,
        }
        if held[self.kind]:
            raise DirectiveError(f"filter {self.filter} matches compute that is already sharded by {self.kind}")
        if self.kind is ShardKind.EXPERT:
            others = [state.tensor]
        else:
            others = [held[kind] for kind in (ShardKind.TENSOR, ShardKind.CONTEXT)]
            others += [state.expert] if self.kind is not ShardKind.CONTEXT else []
        for other in others:
            check_product(groups, other, str(self.kind))

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[ShardEdit]) -> Dag:
        for kind in _ORDER:
            same = [edit for edit in edits if edit.directive.kind is kind]
            if same:
                dag = _apply_kind(dag, same, kind)
        return dag

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        fields = {
            "kind": "expert, tensor, sequence, context, each once on a chunk",
            "devices": "equal groups that cover the placement, of a size that divides the model",
        }

        def draw(rng: Random) -> Shard:
            options = list(_options(dag, mesh))
            if not options:
                raise DirectiveError("no shard directive is legal here")
            return rng.choice(options)

        return Domain(fields, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Shard]:
        """Other kinds of tensor sharding, the other context method, other degrees on the same row."""
        pairs = {ShardKind.TENSOR: ShardKind.SEQUENCE, ShardKind.SEQUENCE: ShardKind.TENSOR}
        near = [replace(self, kind=pairs[self.kind])] if self.kind in pairs else []
        if self.kind is ShardKind.CONTEXT:
            near.append(replace(self, method="all_to_all" if self.method == "ring" else "ring"))
        if self.devices:
            flat = sorted(rank for group in self.devices for rank in group)
            near += [replace(self, devices=groups) for groups in consecutive(tuple(flat)) if groups != self.devices]
        for shard in near:
            if shard.legal(dag, mesh):
                yield shard


def consecutive(row: Ranks) -> Iterator[Groups]:
    """Yield the partitions of a row into equal runs of 2, 3, ... ranks."""
    for size in range(2, len(row) + 1):
        if len(row) % size == 0:
            yield tuple(row[i : i + size] for i in range(0, len(row), size))


def strided(row: Ranks) -> Iterator[Groups]:
    """Yield the partitions of a row into equal groups of every k-th rank."""
    for stride in range(2, len(row)):
        if len(row) % stride == 0:
            yield tuple(row[i::stride] for i in range(stride))


def check_product(groups: Groups, others: Groups, what: str) -> None:
    """Refuse groups of two kinds that share more than one rank: they must form a grid.

    Raises:
        DirectiveError: naming the ranks.
    """
    for group in groups:
        members = set(group)
        for other in others:
            shared = members.intersection(other)
            if len(shared) > 1:
                raise DirectiveError(
                    f"{what} group {list(group)} shares ranks {sorted(shared)} with {list(other)} of another kind",
                    expected="groups that form a product, one rank in common",
                )


def _options(dag: Dag, mesh: Mesh | None) -> Iterator[Shard]:
    held = sorted(
        {(int(s), int(g)) for s, g in zip(dag.nodes.stage[dag.compute], dag.nodes.group[dag.compute], strict=True)}
    )
    experts = any(chunk.region is Region.EXPERT for chunk in dag.chunks)
    for stage, group in held[:8]:
        if group < 0:
            continue
        base = (("PP", stage),) if stage >= 0 else ()
        for groups in (*consecutive(dag.groups[group]), *strided(dag.groups[group])):
            for kind in ShardKind:
                only = (("REGION", "expert"),) if kind is ShardKind.EXPERT else ()
                if only and not experts:
                    continue
                shard = Shard(Filter((*base, *only)), groups, kind=kind)
                if shard.legal(dag, mesh):
                    yield shard


def _apply_kind(dag: Dag, edits: Sequence[ShardEdit], kind: ShardKind) -> Dag:
    streams, n = list(dag.streams), len(edits[0].mask)  # as checked: kinds applied before have added nodes
    stream = np.zeros(n, np.int32)
    for edit in edits:
        name = edit.directive.stream or str(kind)
        if name not in streams:
            streams.append(name)
        stream[edit.mask] = streams.index(name)
    everything = np.zeros(n, np.bool_)
    variants: dict[tuple[Any, bool], Mask] = {}
    for edit in edits:
        if (everything & edit.mask).any():
            raise DirectiveError(f"two {kind} shard directives match the same compute", expected="each chunk once")
        everything |= edit.mask
        dag = _mark(dag, edit, kind)
        variant = (edit.directive.method, edit.directive.regather)
        variants[variant] = variants.get(variant, False) | edit.mask
    dag = replace(dag, streams=tuple(streams))
    for (method, regather), mask in variants.items():
        for phase in _PHASES:
            anchors = np.flatnonzero(mask & (dag.nodes.phase[: len(mask)] == phase))
            dag = _exchange(dag, kind, phase, anchors, stream, method, regather)
    return dag


def _mark(dag: Dag, edit: ShardEdit, kind: ShardKind) -> Dag:
    def change(state: ShardState, row: Ranks) -> ShardState:
        inside = tuple(group for group in edit.groups if set(group) <= set(row))
        match kind:
            case ShardKind.TENSOR:
                return replace(state, tensor=inside)
            case ShardKind.SEQUENCE:
                return replace(state, tensor=inside, sequence=True, regather=edit.directive.regather)
            case ShardKind.CONTEXT:
                return replace(state, context=inside, context_method=edit.directive.method)
            case ShardKind.EXPERT:
                return replace(state, expert=inside)

    padded = np.concatenate([edit.mask, np.zeros(len(dag) - len(edit.mask), np.bool_)])
    return update_states(dag, attached(dag, padded), change)


def _exchange(dag: Dag, kind: ShardKind, phase: Phase, chosen: Any, stream: Ints, method: Any, regather: bool) -> Dag:
    """Put the contract's collectives of one phase around the chosen compute nodes, region by region."""
    region_of = np.asarray([list(Region).index(chunk.region) for chunk in dag.chunks], np.int32)
    region_of = region_of[dag.nodes.chunk[chosen]]
    for number in distinct(region_of).tolist():
        anchors = chosen[region_of == number]
        exchanges = contract(list(Region)[number], kind, phase, regather=regather, method=method)
        before = [exchange for exchange in exchanges if exchange.before]
        after = [exchange for exchange in exchanges if not exchange.before]
        for exchange in (*before, *reversed(after)):  # a later splice lies closer to the compute
            size = np.asarray([payload_bytes(exchange, chunk) for chunk in dag.chunks])
            made: Nodes = dag.nodes.take(anchors).with_(
                kind=int(NodeKind.COLLECTIVE),
                collective=int(exchange.collective),
                axis=int(exchange.axis),
                payload=size[dag.nodes.chunk[anchors]],
                scaled=True,
                stream=stream[anchors],
                policy=0,
            )
            dag = splice(dag, anchors, made, before=exchange.before)
            if exchange.before and phase is not Phase.F:
                dag = _after_forward(dag, len(made))
    return dag


def _after_forward(dag: Dag, count: int) -> Dag:
    """Give the last ``count`` nodes, collectives before a backward, their forward as predecessor where they have none:
    what they gather again was saved then (the head's backward starts the chain of gradients)."""
    fresh = len(dag) - count + np.arange(count)
    fed = np.zeros(len(dag), np.bool_)
    fed[dag.edges.dst] = True
    lone = fresh[~fed[fresh]]
    forward = compute_table(dag)[Phase.F, dag.nodes.chunk[lone], np.maximum(dag.nodes.microbatch[lone], 0)]
    return append(dag, None, Edges.make(forward, lone, Role.SAVED))
