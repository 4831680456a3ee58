"""place: bind compute to rank groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import check_fields, read_devices, read_filter, read_text, resolve, write_devices
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Mask
from piper_core.ir.edit import whole_chunks
from piper_core.ir.filter import Filter
from piper_core.ir.shard_state import Ranks
from piper_core.passes.send_recv import send_recv

if TYPE_CHECKING:
    from piper_core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class PlaceEdit:
    """Nodes to bind (mask over n), the ranks, and the prefix of the streams that their messages use."""

    mask: Mask
    devices: Ranks
    stream: str
    filter: str


@dataclass(frozen=True, slots=True)
class Place(Directive[PlaceEdit]):
    """Bind the matched nodes to a rank group; all groups have one size and are disjoint or the same.

    Rewrite::

        u(stage 0) -> v(stage 1)   becomes   u@[0,1] -> Send => Recv -> v@[2,3]   once both are placed

    A filter on the split tag lets one stage live on two groups (bidirectional pipelines). ``stream`` is a
    name prefix of the point-to-point streams, never one queue: each channel keeps its own.
    """

    op: ClassVar[str] = "place"
    filter: Filter
    devices: Ranks
    stream: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Place:
        name = "device" if "device" in data and "devices" not in data else "devices"
        check_fields(data, ("filter", name), ("stream",))
        groups = read_devices(data)
        if len(groups) != 1:
            raise DirectiveError(
                "place takes one group of devices", expected="a flat list", found=f"{len(groups)} groups"
            )
        return cls(read_filter(data), groups[0], read_text(data, "stream", None))

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "op": self.op,
            "filter": self.filter.to_data(),
            "devices": write_devices((self.devices,)),
        }
        return data | ({"stream": self.stream} if self.stream else {})

    def check(self, dag: Dag, mesh: Mesh | None = None) -> PlaceEdit:
        resolve((self.devices,), None, mesh)
        mask = whole_chunks(self.filter, dag, self.op)
        _fits(dag.groups, self.devices)
        placed = mask & (dag.nodes.group >= 0)
        if placed.any() and any(dag.groups[g] != self.devices for g in np.unique(dag.nodes.group[placed]).tolist()):
            raise DirectiveError(f"filter {self.filter} matches nodes that are already placed elsewhere")
        return PlaceEdit(mask, self.devices, self.stream or "", str(self.filter))

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[PlaceEdit]) -> Dag:
        groups, streams = list(dag.groups), list(dag.streams)
        column, stream = dag.nodes.group.copy(), dag.nodes.stream.copy()
        for edit in edits:
            _fits(groups, edit.devices)
            if edit.devices not in groups:
                groups.append(edit.devices)
            at = groups.index(edit.devices)
            taken = edit.mask & (column >= 0) & (column != at)
            if taken.any():
                other = groups[int(column[np.flatnonzero(taken)[0]])]
                raise DirectiveError(
                    f"filter {edit.filter} places nodes on {list(edit.devices)} that another place "
                    f"directive puts on {list(other)}",
                    expected="each node placed once",
                )
            column[edit.mask] = at
            if edit.stream:
                if edit.stream not in streams:
                    streams.append(edit.stream)
                stream[edit.mask] = streams.index(edit.stream)
        dag = replace(
            dag, nodes=dag.nodes.with_(group=column, stream=stream), groups=tuple(groups), streams=tuple(streams)
        )
        return dag if (column[dag.compute] < 0).any() else send_recv(dag)

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        size = len(dag.groups[0]) if dag.groups else 0
        used = {rank for group in dag.groups for rank in group}
        world = mesh.size if mesh else max(used, default=-1) + 1 + max(size, 2)

        def draw(rng: Random) -> Place:
            free = [rank for rank in range(world) if rank not in used]
            n = size or rng.choice([k for k in (1, 2, 4) if k <= len(free)])
            options = [tuple(free[:n])] if len(free) >= n else [dag.groups[0]]
            unplaced = np.unique(dag.nodes.stage[(dag.nodes.group < 0) & dag.compute]).tolist()
            if not unplaced:
                at = int(rng.choice(np.flatnonzero(dag.compute).tolist()))
                options, unplaced = [dag.groups[dag.nodes.group[at]]], [int(dag.nodes.stage[at])]
                if dag.stages:
                    return cls(Filter((("PP", unplaced[0]),)), options[0])
            if not dag.stages:
                return cls(Filter(()), options[0])
            return cls(Filter((("PP", rng.choice(unplaced)),)), options[0])

        fields = {
            "filter": "unplaced compute",
            "devices": f"{size or 'any number of'} ranks, disjoint from other groups",
        }
        return Domain(fields, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Place]:
        """The same nodes on each other group that is placed already."""
        for group in dag.groups:
            near = replace(self, devices=group)
            if group != self.devices and near.legal(dag, mesh):
                yield near


def _fits(groups: Sequence[Ranks], devices: Ranks) -> None:
    for group in groups:
        if group == devices:
            continue
        if len(group) != len(devices):
            raise DirectiveError(
                f"unequal groups: {list(group)} and {list(devices)}", expected="placements of one size"
            )
        shared = set(group).intersection(devices)
        if shared:
            raise DirectiveError(
                f"overlapping groups: {list(group)} and {list(devices)} share rank {min(shared)}",
                expected="the same group or a disjoint one",
            )
