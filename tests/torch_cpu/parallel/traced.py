"""Collectives and FLOPs of what one rank does, beside the shard contract's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from piper_core.arch import model_chunks
from piper_core.arch.chunk import Chunk
from piper_core.arch.contract import Method, contract, payload_bytes
from piper_core.arch.record import Architecture
from piper_core.frontend import operations
from piper_core.frontend.collectives import Traced, traced
from piper_core.frontend.cut import ChunkGraph, Cut, Piece
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_graphs
from piper_core.names import Phase, Region, ShardKind
from tests.torch_cpu.parallel.divided import WHOLE
from tests.torch_cpu.parallel.models import BATCH, SEQ

Collectives = list[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one region: collectives traced and in the contract, and FLOPs of products with weights."""

    model: str
    kind: str
    degree: int
    region: Region
    phase: Phase
    found: Collectives
    expected: Collectives
    product_flops: int


def rank_rows(arch: Architecture, kind: ShardKind, degree: int, method: Method = "ring") -> list[Row]:
    """Return the rows of one rank of a model that is divided one way."""
    made = rank_graphs(
        arch, division(kind, degree, method), WHOLE, micro_batch=BATCH, seq_len=SEQ, dtype=torch.bfloat16
    )
    return _rows(arch, made, kind, degree, method)


def division(kind: ShardKind, degree: int, method: Method = "ring") -> Degrees:
    """Return the degrees of a model that is divided one way."""
    match kind:
        case ShardKind.EXPERT:
            return Degrees(expert=degree)
        case ShardKind.CONTEXT:
            return Degrees(context=degree, method=method)
        case _:
            return Degrees(tensor=degree, sequence=kind is ShardKind.SEQUENCE)


def whole_rows(arch: Architecture) -> list[Row]:
    """Return the rows of a whole model, which has no collectives."""
    made = rank_graphs(arch, Degrees(), WHOLE, micro_batch=BATCH, seq_len=SEQ, dtype=torch.bfloat16)
    return _rows(arch, made, None, 1)


def _rows(arch: Architecture, made: Cut, kind: ShardKind | None, degree: int, method: Method = "ring") -> list[Row]:
    table = {chunk.name: chunk for chunk in model_chunks(arch, SEQ).chunks}
    return [
        Row(
            arch.name, f"{kind}.{method}" if kind is ShardKind.CONTEXT else str(kind), degree, piece.site.region, phase,
            _merged(traced(graph), degree, kind),
            _contract(table[str(piece.site)], kind, phase, method) if kind else [], _product_flops(graph),
        )
        for piece in made.pieces
        for phase, graph in _phases(piece)
    ]  # fmt: skip


def _phases(piece: Piece) -> list[tuple[Phase, ChunkGraph]]:
    return [
        (Phase.F, piece.forward),
        (Phase.B, piece.backward),
        (Phase.BI, piece.backward_input),
        (Phase.BW, piece.backward_weight),
    ]


def _contract(chunk: Chunk, kind: ShardKind, phase: Phase, method: Method) -> Collectives:
    """Return the contract's collectives of a microbatch, sorted."""
    if kind is ShardKind.EXPERT and chunk.region is not Region.EXPERT:
        return []
    exchanges = contract(chunk.region, kind, phase, method=method)
    return sorted((e.collective.name, e.axis.name, round(BATCH * payload_bytes(e, chunk))) for e in exchanges)


def _merged(collectives: Iterable[Traced], degree: int, kind: ShardKind | None) -> Collectives:
    """Return collectives sorted; of all_to_alls, each rank holds its part, and the contract counts the whole."""
    whole = degree if kind is ShardKind.CONTEXT else 1
    return sorted(
        (c.collective.name, c.axis.name, c.nbytes * (whole if c.collective.name == "ALL_TO_ALL" else 1))
        for c in collectives
    )


def total(collectives: Collectives) -> Counter[tuple[str, str]]:
    """Return bytes by kind and axis."""
    counted: Counter[tuple[str, str]] = Counter()
    for kind, axis, nbytes in collectives:
        counted[kind, axis] += nbytes
    return counted


def _product_flops(graph: ChunkGraph) -> int:
    return sum(operations.product(node).flops for node in graph.calls if operations.is_product(node))
