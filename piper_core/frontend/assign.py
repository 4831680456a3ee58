"""Which region of which layer each node of a joint graph belongs to.

Forward nodes: by annotation. What is outside every layer goes to ``embed`` before the first layer, to ``head`` after
the last, and to the layer before it in between. Inside a layer, a module that has no region goes with the region that
follows (a norm before attention), and a bare operation with the region that came before (a residual add). Regions that
feed each other in a circle become one.

Backward nodes: with the forward that they are the backward of. Gradient accumulation carries no annotation: it goes
to the operand's region that comes last in the backward, so that one gradient leaves a region for each value that came
in. Whatever else carries none goes to the region that uses it.

Nodes outside every region that depend on no input and no parameter (rotary tables, masks) belong to none: they are the
prelude, computed once and not for each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from piper_core.frontend.annotate import CHILD, LAYER, PREFIX, REGION, ROOT
from piper_core.frontend.capture import Joint
from piper_core.names import Region

_BUILT_IN = frozenset({LAYER, REGION, CHILD, ROOT})
Tags = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One region of one layer, with the person's own tags: where a chunk comes from. ``layer`` is -1 for the
    embedding and the number of layers for the head."""

    layer: int
    region: Region
    tags: Tags = ()

    def __str__(self) -> str:
        return str(self.region) if self.region in (Region.EMBED, Region.HEAD) else f"L{self.layer}.{self.region}"


@dataclass(slots=True)
class Assignment:
    """Sites in forward order, the index of each node's site, which nodes are backward, and the prelude."""

    sites: list[Site] = field(default_factory=list)
    site_of: dict[Node, int] = field(default_factory=dict)
    backward: set[Node] = field(default_factory=set)
    prelude: list[Node] = field(default_factory=list)


def assign(joint: Joint, layers: int | None = None) -> Assignment:
    """Return the assignment of every call of ``joint``; ``layers`` is the number of layers (default: highest + 1)."""
    calls = [node for node in joint.nodes if node.op == "call_function"]
    made = Assignment()
    made.backward = {node for node in calls if node.meta.get("partitioner_tag") == "is_backward"}
    forward = [node for node in calls if node not in made.backward]
    made.prelude = _prelude(joint, forward)
    alone = set(made.prelude)
    forward = [node for node in forward if node not in alone]
    sites = _forward_sites([_tags(node) for node in forward], layers)
    _number(made, forward, sites)
    _join_circles(made, forward)
    _backward(made, [node for node in calls if node in made.backward], forward)
    return made


def _tags(node: Node) -> dict[str, Any]:
    custom = node.meta.get("custom") or {}
    return {key[len(PREFIX) :]: value for key, value in custom.items() if key.startswith(PREFIX)}


def _prelude(joint: Joint, forward: list[Node]) -> list[Node]:
    """Return the forward nodes outside every region that depend on buffers and literals alone."""
    names = {*joint.parameters, *joint.inputs}
    varying = {node for node in joint.nodes if node.op == "placeholder" and node.name in names}
    found = []
    for node in forward:
        if _tags(node).keys() & {LAYER, REGION} or any(n in varying for n in node.all_input_nodes):
            varying.add(node)
        else:
            found.append(node)
    return found


def _forward_sites(tags: list[dict[str, Any]], layers: int | None) -> list[Site]:
    """Return the site of each forward node from its tags, in trace order."""
    own = [tuple(sorted((k, v) for k, v in each.items() if k not in _BUILT_IN)) for each in tags]
    layer = [each.get(LAYER) for each in tags]
    region = [each.get(REGION) for each in tags]
    known = [value for value in layer if value is not None]
    if not known:  # no layers: each stretch under other annotations counts as one
        marks = list(zip(own, region, strict=True))
        filled = _nearest(marks, [bool(mine or name) for mine, name in marks])
        order = {mark: i for i, mark in enumerate(dict.fromkeys(filled))}
        ends = {Region.EMBED: -1} if layers is None else {Region.EMBED: -1, Region.HEAD: layers}
        return [Site(ends.get(mark[1], order[mark]), Region(mark[1] or Region.MLP), mark[0]) for mark in filled]
    count = max(known) + 1 if layers is None else layers
    first, last = layer.index(known[0]), len(layer) - 1 - layer[::-1].index(known[-1])
    for i in range(len(tags)):
        if layer[i] is None and (region[i] in (None, Region.EMBED, Region.HEAD)):
            before, after = i < first, i > last
            region[i] = region[i] or (Region.EMBED if before else Region.HEAD if after else None)
        if layer[i] is None:
            layer[i] = -1 if i < first else count if i > last else layer[i - 1]
    own = _nearest(own, [bool(each) for each in own])
    for each in sorted({int(value) for value in layer if value is not None}):
        members = [i for i in range(len(tags)) if layer[i] == each]
        _fill_region(members, region, [CHILD in tags[i] for i in members])
    return [
        Site(-1 if name == Region.EMBED else count if name == Region.HEAD else int(at or 0), Region(name or ""), mine)
        for at, name, mine in zip(layer, region, own, strict=True)
    ]


def _fill_region(members: list[int], region: list[Any], child: list[bool]) -> None:
    """Give the members of a layer that have no region that of a neighbour: the next for a module, else the last."""
    following: list[Any] = []
    after = None
    for i in reversed(members):
        after = region[i] or after
        following.append(after)
    before = None
    for i, next_one, is_child in zip(members, reversed(following), child, strict=True):
        if region[i] is None:
            region[i] = (next_one or before if is_child else before or next_one) or Region.MLP
        else:
            before = region[i]


def _nearest(values: list[Any], known: list[bool]) -> list[Any]:
    """Return values with each unknown one replaced by the last known before it, or else the first after it; as they
    are where none is known."""
    if not any(known):
        return values
    current = next(value for value, is_known in zip(values, known, strict=True) if is_known)
    filled = []
    for value, is_known in zip(values, known, strict=True):
        current = value if is_known else current
        filled.append(current)
    return filled


def _number(made: Assignment, forward: list[Node], sites: list[Site]) -> None:
    """Number the sites in order of first node."""
    index: dict[Site, int] = {}
    for node, site in zip(forward, sites, strict=True):
        made.site_of[node] = index.setdefault(site, len(index))
    made.sites = list(index)


def _join_circles(made: Assignment, forward: list[Node]) -> None:
    """Make one site of a run of sites from whose end a value goes back to its start."""
    joined = list(range(len(made.sites)))
    for node in forward:
        mine = made.site_of[node]
        for source in node.all_input_nodes:
            other = made.site_of.get(source)
            if other is not None and joined[other] > joined[mine]:
                low, high = joined[mine], joined[other]
                joined = [low if low <= each <= high else each for each in joined]
    if len(set(joined)) == len(joined):
        return
    kept = sorted(set(joined))
    rank = {old: new for new, old in enumerate(kept)}
    made.sites = [made.sites[old] for old in kept]
    made.site_of = {node: rank[joined[site]] for node, site in made.site_of.items()}


def _backward(made: Assignment, backward: list[Node], forward: list[Node]) -> None:
    """Assign backward nodes, see the module's docstring."""
    by_number: dict[int, int] = {}
    for node in forward:  # calls without a gradient have the number of the last one with one
        if "seq_nr" in node.meta:
            by_number.setdefault(node.meta["seq_nr"], made.site_of[node])
    loose = []
    for node in backward:
        site = by_number.get(node.meta.get("seq_nr", -1)) if _tags(node) else None
        if site is None:
            site = _last(made.site_of.get(n) for n in node.all_input_nodes if n in made.backward)
        if site is None:
            loose.append(node)
        else:
            made.site_of[node] = site
    for node in reversed(loose):
        users = [made.site_of[user] for user in node.users if user in made.site_of]
        made.site_of[node] = max(users, default=len(made.sites) - 1)


def _last(sites: Iterable[int | None]) -> int | None:
    """Return the site that comes last in the backward, that is first in the forward."""
    return min((site for site in sites if site is not None), default=None)
