"""Shard contract: which collectives a region needs for each kind of sharding, in each phase."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal, assert_never

from piper_core.arch.chunk import Chunk
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import Axis, Collective, Phase, Region, ShardKind

Payload = Literal["hidden", "column", "token", "kv", "qkv", "out", "loss"]
Method = Literal["ring", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective around a chunk's compute, ``before`` or after it.

    ``payload`` names the tensor: full size for one sequence, whatever the degrees (see ``payload_bytes``).
    """

    collective: Collective
    axis: Axis
    before: bool
    payload: Payload
    scale: float = 1.0


def payload_bytes(exchange: Exchange, chunk: Chunk) -> float:
    """Return the full-size bytes of ``exchange`` for one sequence of ``chunk``.

    ``qkv`` and ``out`` split what an all-to-all context exchange moves: queries, keys and values before
    attention, its output (as wide as the queries) after.
    """
    match exchange.payload:
        case "hidden":
            size = chunk.hidden_bytes
        case "column":
            size = chunk.column_bytes or chunk.hidden_bytes
        case "token":
            size = chunk.token_bytes
        case "kv":
            size = chunk.kv_bytes
        case "qkv":
            size = (chunk.qkvo_bytes + chunk.kv_bytes) / 2
        case "out":
            size = (chunk.qkvo_bytes - chunk.kv_bytes) / 2
        case "loss":
            size = chunk.loss_bytes
        case _:
            assert_never(exchange.payload)
    return size * exchange.scale


def exchanged_bytes(exchange: Exchange, chunk: Chunk, tensor: int = 1, context: int = 1) -> float:
    """Return the bytes of ``exchange`` for one sequence on one rank, in the sense of a collective's full size.

    Context parallelism divides what a rank has; but a ring shows each rank the whole sequence. What context ranks
    exchange are heads, which tensor parallelism divides.
    """
    size = payload_bytes(exchange, chunk)
    if exchange.axis is Axis.CONTEXT:
        size /= tensor
    return size if exchange.collective is Collective.RING_EXCHANGE else size / context


def accepted_kinds(region: Region) -> frozenset[ShardKind]:
    """Return the kinds of ``shard`` that a region accepts."""
    common = {ShardKind.TENSOR, ShardKind.SEQUENCE, ShardKind.CONTEXT}
    return frozenset(common | {ShardKind.EXPERT} if region is Region.EXPERT else common)


def contract(
    region: Region, kind: ShardKind, phase: Phase, *, regather: bool = True, method: Method = "ring"
) -> tuple[Exchange, ...]:
    """Return the collectives of one region under one kind of shard, in order.

    ``sequence`` includes tensor parallelism and takes the place of ``tensor``. R communicates as F. Under
    ``regather`` the sequence-sharded input is gathered again before the weight gradient (Korthikanti 2022,
    arXiv 2205.05198, section 4.2.2). ``method`` is for ``context``: a ring of keys and values (arXiv
    2310.01889) or two all_to_alls (arXiv 2309.14509). With several kinds on a region, ``expert`` is
    outermost: its dispatch comes first and its combine last.

    Raises:
        ConfigError: the region does not accept the kind.
    """
    if kind not in accepted_kinds(region):
        names = ", ".join(sorted(accepted_kinds(region)))
        raise ConfigError(f"a {region} region cannot be sharded by {kind}; it accepts {names}")
    phase = Phase.F if phase is Phase.R else phase
    match kind:
        case ShardKind.TENSOR:
            return _tensor(region, phase)
        case ShardKind.SEQUENCE:
            return _sequence(region, phase, regather)
        case ShardKind.EXPERT:
            return _expert(phase)
        case ShardKind.CONTEXT:
            return _context(region, phase, method)
        case _:
            assert_never(kind)


def _tensor(region: Region, phase: Phase) -> tuple[Exchange, ...]:
    """Megatron: partial sums meet after the row-parallel layer in F, before the column-parallel one in BI."""
    if region is Region.ROUTER or phase is Phase.BW:
        return ()
    reduce = Exchange(Collective.ALL_REDUCE, Axis.TENSOR, False, "column" if phase in (Phase.B, Phase.BI) else "hidden")
    if region is Region.EMBED:
        return (reduce,) if phase is Phase.F else ()
    if region is Region.HEAD and phase is Phase.F:
        return (Exchange(Collective.ALL_REDUCE, Axis.TENSOR, False, "loss"),)
    return (reduce,)


def _sequence(region: Region, phase: Phase, regather: bool) -> tuple[Exchange, ...]:
    """Each all_reduce becomes a reduce_scatter, and an all_gather where the tensor is used."""
    first: Payload = "token" if region is Region.EXPERT else "column"
    last: Payload = "token" if region is Region.EXPERT else "hidden"
    forward, whole, weight = phase is Phase.F, phase is Phase.B, phase is Phase.BW
    gather = Exchange(Collective.ALL_GATHER, Axis.SEQUENCE, True, first if forward else last)
    scatter = Exchange(Collective.REDUCE_SCATTER, Axis.SEQUENCE, False, last if forward else first)
    if region is Region.ROUTER:
        return ()
    if region is Region.EMBED:  # its whole backward is a weight gradient, which needs the full gradient
        return (scatter,) if forward else (gather,) if whole or weight else ()
    again = (Exchange(Collective.ALL_GATHER, Axis.SEQUENCE, True, first),) if regather else ()
    if weight:
        return again
    if region is Region.HEAD:
        if forward:
            return gather, Exchange(Collective.ALL_REDUCE, Axis.TENSOR, False, "loss")
        return (*(again if whole else ()), scatter)
    return (*(again if whole else ()), gather, scatter)


def _expert(phase: Phase) -> tuple[Exchange, ...]:
    """Dispatch tokens to their experts and combine; gradients take the same two ways."""
    if phase is Phase.BW:
        return ()
    dispatch = Exchange(Collective.ALL_TO_ALL, Axis.EXPERT, True, "token")
    return dispatch, Exchange(Collective.ALL_TO_ALL, Axis.EXPERT, False, "token")


def _context(region: Region, phase: Phase, method: Method) -> tuple[Exchange, ...]:
    """Attention meets the other ranks' tokens; every other region works on its own."""
    if region is not Region.ATTENTION or phase is Phase.BW:
        return ()
    forward = phase is Phase.F
    if method == "ring":  # the backward carries gradients of keys and values round as well
        return (Exchange(Collective.RING_EXCHANGE, Axis.CONTEXT, True, "kv", 1.0 if forward else 2.0),)
    first, last = ("qkv", "out") if forward else ("out", "qkv")
    return (
        Exchange(Collective.ALL_TO_ALL, Axis.CONTEXT, True, first),  # type: ignore[arg-type]
        Exchange(Collective.ALL_TO_ALL, Axis.CONTEXT, False, last),  # type: ignore[arg-type]
    )


def shard_units(architecture: Architecture, seq_len: int) -> tuple[tuple[str, int], ...]:
    """Return, for each kind of shard, the number that its degree must divide.

    tensor: query heads, key heads, feed-forward widths, vocabulary; sequence: those and the sequence;
    expert: experts (1 in a dense model); context: half the sequence, since a ring balances the causal mask
    with two parts a rank.
    """
    arch = architecture
    widths = [width for width in (arch.ffn, arch.expert_ffn, arch.shared_ffn) if width]
    tensor = gcd(arch.heads, arch.kv_heads, arch.vocab, *widths)
    context = seq_len // 2 if seq_len % 2 == 0 else 1
    return (
        (str(ShardKind.TENSOR), tensor),
        (str(ShardKind.SEQUENCE), gcd(tensor, seq_len)),
        (str(ShardKind.EXPERT), max(arch.experts, 1)),
        (str(ShardKind.CONTEXT), context),
    )


def legal_degrees(
    architecture: Architecture, kind: ShardKind, seq_len: int, *, limit: int = 1 << 20
) -> tuple[int, ...]:
    """Return the degrees up to ``limit`` that divide what ``kind`` splits (see :func:`shard_units`)."""
    unit = dict(shard_units(architecture, seq_len))[str(kind)]
    return tuple(degree for degree in range(1, min(unit, limit) + 1) if unit % degree == 0)


def check_degree(architecture: Architecture, kind: ShardKind, degree: int, seq_len: int) -> None:
    """Reject a degree that does not divide what ``kind`` splits.

    Raises:
        ConfigError: with the degrees that would do.
    """
    legal = legal_degrees(architecture, kind, seq_len)
    if degree not in legal:
        shown = ", ".join(map(str, legal[:12])) + (", ..." if len(legal) > 12 else "")
        raise ConfigError(
            f"model {architecture.name!r} at sequence length {seq_len} cannot be split {degree} ways by "
            f"{kind}; legal degrees are {shown}"
        )
