"""From captured layers to every layer of the model: one chunk for each, and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_core.frontend.cut import Cut
from piper_core.frontend.table import Instance
from piper_core.names import Region

Edges = tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How captured layers stand for the model's: ``captured`` gives the captured one of each layer (none: the model
    has no layers), ``prefix`` is what parameters of blocks are called before the layer's index."""

    captured: tuple[int, ...]
    prefix: str = "layers."

    @property
    def whole(self) -> bool:
        """Whether every layer was captured."""
        return self.captured == tuple(range(len(self.captured)))


def stands_for_more(made: Cut, blocks: int) -> bool:
    """Say whether a capture of a few blocks can be laid out for more: it has both ends, and no tags of a person's own,
    which count what they were on."""
    layers = {piece.site.layer for piece in made.pieces}
    return layers == set(range(-1, blocks + 1)) and not any(piece.site.tags for piece in made.pieces)


def expand(
    made: Cut, layout: Layout, at: Mapping[int, int], sizes: Sequence[float]
) -> tuple[tuple[Instance, ...], Edges]:
    """Return every chunk of the model and its edges; ``at`` is each piece's template, ``sizes`` each edge's bytes."""
    pieces = made.pieces
    if layout.whole:
        plan = [(piece.site.layer, index) for index, piece in enumerate(pieces)]
        edges = tuple((source, to, size) for (source, to, _), size in zip(made.edges, sizes, strict=True))
    else:
        plan = _plan(made, layout)
        edges = _edges(made, plan, sizes)
    mixtures = 0
    instances = []
    for layer, index in plan:
        site = pieces[index].site
        tags = site.tags
        if site.region is Region.EXPERT and "EP" not in dict(tags):
            tags = (*tags, ("EP", mixtures))
            mixtures += 1
        instances.append(Instance(at[index], layer, tags))
    return tuple(instances), edges


def _plan(made: Cut, layout: Layout) -> list[tuple[int, int]]:
    """Return (layer, piece) of every chunk, in forward order."""
    members: dict[int, list[int]] = {}
    for index, piece in enumerate(made.pieces):
        members.setdefault(piece.site.layer, []).append(index)
    layers = [(-1, -1), *enumerate(layout.captured), (len(layout.captured), max(members))]
    return [(layer, index) for layer, own in layers for index in members.get(own, ())]


def _edges(made: Cut, plan: Sequence[tuple[int, int]], sizes: Sequence[float]) -> Edges:
    """Return the edges between chunks: an edge from the layer before comes from the layer before wherever that is."""
    place: dict[tuple[int, Region], int] = {}
    for number, (layer, index) in enumerate(plan):
        place[layer, made.pieces[index].site.region] = number
    found = []
    for to, (layer, index) in enumerate(plan):
        mine = made.pieces[index].site.layer
        for (source, target, _), size in zip(made.edges, sizes, strict=True):
            if target == index:
                other = made.pieces[source].site
                back = layer - (mine - other.layer) if other.layer >= 0 else -1
                found.append((place[back, other.region], to, size))
    return tuple(found)
