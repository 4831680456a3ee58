"""The distinct chunks of a model: what is priced once for all chunks that are alike."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from piper_core.arch.chunk import Chunk, ModelChunks
from piper_core.ir.dag import Floats, Ints, Mask
from piper_core.names import Region

REGIONS = tuple(Region)


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter of a chunk: elements, which kinds of sharding divide it, and the name that ties it to others."""

    numel: int
    tensor: bool
    expert: bool
    tie: str


@dataclass(frozen=True, slots=True)
class Kinds:
    """The chunks of a model by kind; ``of``, ``layer`` and ``region`` are by chunk, shape (C,), ``layer`` -1 for the
    embedding and L for the head, ``region`` an index into ``REGIONS``. ``layered`` is what full recompute may repeat,
    ``attention`` what selective does; ``regions`` are the chunks of each region; ``fed`` whether a chunk is fed from
    another layer (or by nothing); ``last_of_layer`` the last chunk of each chunk's layer. ``boundary_bytes`` is what a
    layer hands to the next one, at its last chunk. ``parameters`` are by kind; ``ties`` name those that several chunks
    hold; ``edges`` join chunks.
    """

    chunks: tuple[Chunk, ...]
    of: Ints
    layer: Ints
    region: Ints
    layered: Mask
    attention: Mask
    regions: tuple[Ints, ...]
    fed: Mask
    last_of_layer: Ints
    boundary_bytes: Floats
    parameters: tuple[tuple[Piece, ...], ...]
    ties: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    def edges_from(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the edges between chunks ``low`` to ``high`` - 1."""
        a, b = bisect_left(self.edges, (low, 0)), bisect_left(self.edges, (high, 0))
        return [(u, v) for u, v in self.edges[a:b] if v < high]

    def field(self, name: str) -> Floats:
        """Return a numeric field of each chunk, shape (C,)."""
        return np.asarray([getattr(chunk, name) for chunk in self.chunks], np.float64)[self.of]

    def saved(self, name: str) -> tuple[Floats, Floats]:
        """Return the sharded and the replicated bytes of a ``Saved`` field of each chunk."""
        table = [getattr(chunk, name) for chunk in self.chunks]
        sharded = np.asarray([each.sharded for each in table], np.float64)
        replicated = np.asarray([each.replicated for each in table], np.float64)
        return sharded[self.of], replicated[self.of]


def kinds_of(model: ModelChunks) -> Kinds | None:
    """Return the kinds of a model's chunks; None where data crosses from layer to layer other than from the last chunk
    of one to the first of the next."""
    chunks = model.chunks
    layer = np.asarray([chunk.layer for chunk in chunks], np.int32)
    ends = np.asarray([layer[0] - 1, *layer.tolist(), layer[-1] + 1])
    if (np.diff(layer) < 0).any() or not model.edges:
        return None
    first = np.flatnonzero(np.diff(ends)[:-1])
    of_layer = np.cumsum(np.diff(ends)[:-1] != 0) - 1
    last = np.append(first[1:], len(chunks)) - 1
    boundary, fed = np.zeros(len(chunks)), np.zeros(len(chunks), np.bool_)
    for u, v, size in model.edges:
        if layer[u] == layer[v]:
            if u >= v:
                return None
            continue
        if v != u + 1 or boundary[u]:
            return None
        boundary[u] = size
        fed[v] = True
    crossing = np.flatnonzero(np.diff(layer))
    if not boundary[crossing].all():
        return None
    sources = {v for _, v, _ in model.edges}
    fed |= np.asarray([c not in sources for c in range(len(chunks))])
    known: dict[tuple[Chunk, tuple[Piece, ...]], int] = {}
    shared: dict[tuple[int, ...], int] = {}  # hashing a chunk takes longer than all else here
    made: list[Chunk] = []
    parameters: list[tuple[Piece, ...]] = []
    of = []
    for chunk in chunks:
        pieces = tuple(Piece(p.numel, p.tensor, p.expert, p.tie) for p in chunk.parameters)
        plain = replace(chunk, layer=0, parameters=(), tags=())
        quick = (id(chunk.forward), id(chunk.backward_input), id(chunk.backward_weight), hash(pieces))
        same = shared.get(quick)
        if same is None or made[same] != plain or parameters[same] != pieces:
            same = known.setdefault((plain, pieces), len(made))
            if same == len(made):
                made.append(plain)
                parameters.append(pieces)
            shared[quick] = same
        of.append(same)
    regions = {region: i for i, region in enumerate(REGIONS)}
    region = np.asarray([regions[chunk.region] for chunk in chunks], np.int32)
    ties: dict[str, int] = {}
    for kind in of:
        for piece in parameters[kind]:
            if piece.tie:
                ties[piece.tie] = ties.get(piece.tie, 0) + 1
    return Kinds(
        tuple(made), np.asarray(of), layer, region,
        ~np.isin(region, (regions[Region.EMBED], regions[Region.HEAD])),
        region == regions[Region.ATTENTION], tuple(np.flatnonzero(region == i) for i in range(len(REGIONS))), fed,
        last[of_layer], boundary,
        tuple(parameters), tuple(name for name, count in ties.items() if count > 1),
        tuple(sorted((u, v) for u, v, _ in model.edges)),
    )  # fmt: skip
