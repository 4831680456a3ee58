"""Collectives and FLOPs of what one rank does, traced under a fake group, beside the shard contract's."""

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
from piper_core.frontend.capture import capture, fake
from piper_core.frontend.collectives import Traced, traced
from piper_core.frontend.context_parallel import parallelize_context
from piper_core.frontend.cut import ChunkGraph, Cut, Piece, cut
from piper_core.frontend.expert_parallel import parallelize_experts
from piper_core.frontend.sharding_plan import TensorGroup
from piper_core.frontend.tensor_parallel import capture_local, fake_mesh, parallelize
from piper_core.models import build_model
from piper_core.names import Axis, Phase, Region, ShardKind
from tests.torch_cpu.parallel.models import BATCH, SEQ, places

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


def all_rows(tensor: dict[int, tuple[Architecture, ...]], mixture: Architecture, dense: Architecture) -> list[Row]:
    """Return the rows of models divided by tensor and by sequence, by degree, and of :func:`exchange_rows`."""
    rows = exchange_rows(mixture, dense, 2)
    for degree, architectures in tensor.items():
        with fake_mesh(degree) as mesh:
            for arch in architectures:
                for kind in (ShardKind.TENSOR, ShardKind.SEQUENCE):
                    group = TensorGroup(mesh, kind is ShardKind.SEQUENCE)
                    with fake():
                        model = parallelize(build_model(arch, layers=1, dtype=torch.bfloat16), group)
                        tokens = torch.empty(BATCH, SEQ, dtype=torch.int64)
                    made = cut(capture_local(model, (tokens, tokens), group, places(model)))
                    rows += _rows(arch, made, kind, degree)
    return rows


def whole_rows(architectures: tuple[Architecture, ...]) -> list[Row]:
    """Return the rows of whole models, which have no collectives."""
    rows = []
    for arch in architectures:
        with fake():
            model = build_model(arch, layers=1, dtype=torch.bfloat16)
            tokens = torch.empty(BATCH, SEQ, dtype=torch.int64)
        rows += _rows(arch, cut(capture(model, (tokens, tokens), places(model))), None, 1)
    return rows


def exchange_rows(mixture: Architecture, dense: Architecture, degree: int) -> list[Row]:
    """Return the rows of a mixture divided by experts, evenly routed, and of a dense model divided by context."""
    rows = []
    with fake_mesh(degree) as mesh:
        with fake():
            model = build_model(mixture, layers=1, dtype=torch.bfloat16, routing="balanced")
            parallelize_experts(model, mesh.get_group(), fair=True)
            tokens = torch.empty(BATCH, SEQ, dtype=torch.int64)
        rows += _rows(mixture, cut(capture(model, (tokens, tokens), places(model))), ShardKind.EXPERT, degree)
        methods: tuple[Method, ...] = ("ring", "all_to_all")
        for method in methods:
            with fake():
                model = parallelize_context(build_model(dense, layers=1, dtype=torch.bfloat16), mesh, method)
                tokens = torch.empty(BATCH, SEQ // degree, dtype=torch.int64)
            made = cut(capture(model, (tokens, tokens), places(model)))
            rows += _rows(dense, made, ShardKind.CONTEXT, degree, method)
    return rows


def _rows(arch: Architecture, made: Cut, kind: ShardKind | None, degree: int, method: Method = "ring") -> list[Row]:
    table = {chunk.name: chunk for chunk in model_chunks(arch, SEQ).chunks}
    return [
        Row(
            arch.name, f"{kind}.{method}" if kind is ShardKind.CONTEXT else str(kind), degree, piece.site.region, phase,
            _merged(traced(graph, Axis.CONTEXT if kind is ShardKind.CONTEXT else Axis.EXPERT), degree, kind),
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
