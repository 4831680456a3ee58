"""Macro actions of overlap groups: opened around their collectives, which run on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from piper_core.ir.dag import Ints
from piper_core.names import Phase


@dataclass(frozen=True, slots=True)
class StageNodes:
    """What one stage runs in one phase for one microbatch, in the order of the DAG's nodes.

    Of each node: the chunk (from 0), which collective it is (-1: compute; ``before`` says of each whether it comes
    before the compute), and whether it is recomputed. Of each chunk: its segment, that of its recompute, and the last
    chunk of its layer. ``edges`` are between chunks, forward; ``whole_layers`` says whether a recompute runs through
    all of a layer; ``starts`` whether the last chunk starts the backward of the model.
    """

    phase: Phase
    chunk: tuple[int, ...]
    talk: tuple[int, ...]
    again: tuple[bool, ...]
    before: tuple[bool, ...]
    segment: tuple[int, ...]
    repeat_segment: tuple[int, ...]
    last_of_layer: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    whole_layers: bool
    starts: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """The pieces of a macro action: ``piece`` of each node, ``talk`` of each piece the node that it is (-1: compute);
    the pieces that take what comes in and make what goes out; ``edges`` (n, 2) between pieces of which one is beside
    compute; ``saved`` (n, 2) are a chunk and a piece beside compute for which its forward keeps something."""

    piece: tuple[int, ...]
    talk: tuple[int, ...]
    enter: int
    exit: int
    edges: Ints
    saved: Ints


def opened(stage: StageNodes) -> Opened:
    """Cut a macro action at its segments and around each of its collectives."""
    chains, repeats = _chains(stage, again=False), _chains(stage, again=True)
    ends = max(chains)
    forward = stage.phase is Phase.F
    edges: list[tuple[int, int]] = []
    for chain in (*chains.values(), *repeats.values()):
        edges += pairwise(chain)
    for u, v in stage.edges:
        edges.append((chains[u][-1], chains[v][0]) if forward else (chains[v][-1], chains[u][0]))
        if u in repeats and v in repeats and stage.whole_layers and stage.last_of_layer[u] == stage.last_of_layer[v]:
            edges.append((repeats[u][-1], repeats[v][0]))
    for chunk, chain in repeats.items():
        edges.append((_compute(stage, chain), _compute(stage, chains[chunk])))
    fed = {v for _, v in edges}
    saved = [(chunk, chain[0]) for chunk, chain in repeats.items() if chain[0] not in fed]
    if stage.starts and not forward:
        saved.append((ends, chains[ends][0]))
    piece, talk = _pieces(stage, _inner_order(stage, edges))
    into, out = (chains[0][0], chains[ends][-1]) if forward else (chains[ends][0], chains[0][-1])
    beside = {p for p, node in enumerate(talk) if node >= 0}
    kept = [(ends, p) for p in beside if stage.again[talk[p]]]  # a plan says of whole forwards what a recompute needs
    return Opened(
        tuple(piece), tuple(talk), piece[into], piece[out],
        _table({(piece[u], piece[v]) for u, v in edges if piece[u] != piece[v] and {piece[u], piece[v]} & beside}),
        _table([(chunk, piece[node]) for chunk, node in saved if piece[node] in beside] + kept),
    )  # fmt: skip


def _table(pairs: Iterable[tuple[int, int]]) -> Ints:
    return np.asarray(sorted(pairs), np.int64).reshape(-1, 2)


def _chains(stage: StageNodes, *, again: bool) -> dict[int, list[int]]:
    """Return the nodes of each chunk from first to last: what comes later is closer to the compute."""
    before: dict[int, list[int]] = {}
    compute: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    for node, (chunk, talk, repeated) in enumerate(zip(stage.chunk, stage.talk, stage.again, strict=True)):
        if repeated is not again:
            continue
        if talk < 0:
            compute[chunk] = node
        elif stage.before[talk]:
            before.setdefault(chunk, []).append(node)
        else:
            after.setdefault(chunk, []).insert(0, node)
    return {chunk: [*before.get(chunk, ()), node, *after.get(chunk, ())] for chunk, node in compute.items()}


def _compute(stage: StageNodes, chain: Sequence[int]) -> int:
    return next(node for node in chain if stage.talk[node] < 0)


def _inner_order(stage: StageNodes, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the nodes as they run: by chunk, a layer's recompute right before its backward."""
    out: list[list[int]] = [[] for _ in stage.chunk]
    degree = [0] * len(stage.chunk)
    for u, v in edges:
        out[u].append(v)
        degree[v] += 1

    def rank(node: int) -> tuple[int, int, int, int]:
        chunk = stage.chunk[node]
        if stage.again[node]:
            return -stage.last_of_layer[chunk], -1, chunk, node
        return (chunk if stage.phase is Phase.F else -chunk), 0, node, node

    ready = [rank(node) for node, n in enumerate(degree) if n == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        node = heappop(ready)[-1]
        order.append(node)
        for v in out[node]:
            degree[v] -= 1
            if degree[v] == 0:
                heappush(ready, rank(v))
    return order


def _pieces(stage: StageNodes, order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the piece of each node, and of each piece the collective that it is (-1: compute)."""
    piece, talk = [0] * len(order), list[int]()
    current: tuple[bool, int] | None = None
    for node in order:
        chunk = stage.chunk[node]
        segment = (stage.repeat_segment if stage.again[node] else stage.segment)[chunk]
        token = (True, node) if stage.talk[node] >= 0 else (False, segment)
        if token != current:
            current = token
            talk.append(node if stage.talk[node] >= 0 else -1)
        piece[node] = len(talk) - 1
    return piece, talk
