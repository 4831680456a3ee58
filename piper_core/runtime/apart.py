"""Experts whose exchange of tokens stands apart, as the actions of its own that it is in the plan.

In an overlap group the plan opens a chunk of experts around its collectives: tokens leave, the other member computes,
the experts compute, tokens go back, the other member computes. The graph of the chunk is then three, with the
collectives between them, which :mod:`piper_core.runtime.bind` begins and finishes as steps::

    before -> [first] -> middle -> [second] -> after
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.fx import Node

from piper_core.frontend.capture import Joint
from piper_core.frontend.cut import ChunkGraph, is_view, reach

_DISPATCH, _COLLECT = torch.ops.piper_core.dispatch.default, torch.ops.piper_core.collect.default


class Part(Enum):
    """A part of a chunk: all of it, or what is before, between and after its two exchanges."""

    WHOLE = auto()
    BEFORE = auto()
    MIDDLE = auto()
    AFTER = auto()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The two collectives of a chunk and the graphs around them."""

    first: Node
    second: Node
    parts: Mapping[Part, ChunkGraph]


def exchange(whole: ChunkGraph, joint: Joint, gradients: set[Node]) -> Exchange | None:
    """Return how a chunk comes apart; None if it does not: without one dispatch and one collect, or where what comes
    before or after them needs parameters or makes their gradients."""
    own = set(whole.calls)
    first = [node for node in whole.calls if node.target is _DISPATCH]
    second = [node for node in whole.calls if node.target is _COLLECT]
    if len(first) != 1 or len(second) != 1:
        return None
    (leave,), (back,) = first, second
    before = _closure([leave], lambda node: [n for n in node.all_input_nodes if n in own]) - {leave}
    after = _closure([back], lambda node: [n for n in node.users if n in own]) - {back}
    if back not in _closure([leave], lambda node: [n for n in node.users if n in own]):
        return None
    free = _free(whole, joint)
    ends = (before | after) - free
    fixed = {node for node in joint.nodes if node.name in joint.parameters} | free
    if ends & gradients or any(not fixed.isdisjoint(node.all_input_nodes) for node in ends):
        return None
    middle = own - before - after - free - {leave, back}

    def graph(part: set[Node]) -> ChunkGraph:
        outputs = set(whole.outputs)
        out = [
            n for n in whole.calls if n in part and (n in outputs or any(u in own and u not in part for u in n.users))
        ]
        return reach(whole.phase, out, lambda node: node in part or node in free)

    parts = {Part.BEFORE: graph(before - free), Part.MIDDLE: graph(middle), Part.AFTER: graph(after - free)}
    return Exchange(leave, back, parts)


def _closure(seeds: list[Node], following: Callable[[Node], list[Node]]) -> set[Node]:
    found, waiting = set(seeds), list(seeds)
    while waiting:
        more = [node for node in following(waiting.pop()) if node not in found]
        found.update(more)
        waiting += more
    return found


def _free(whole: ChunkGraph, joint: Joint) -> set[Node]:
    """Return the views of parameters, which are made again wherever they are read."""
    found = {node for node in joint.nodes if node.name in joint.parameters}
    views: set[Node] = set()
    for node in whole.calls:
        if node.all_input_nodes and all(each in found for each in node.all_input_nodes) and is_view(node):
            found.add(node)
            views.add(node)
    return views
