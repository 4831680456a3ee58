"""Closed sets of names used everywhere, one meaning each (glossary in the README)."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """What a compute node does: F forward, B whole backward, BI backward for inputs, BW for weights, R recompute."""

    F = 0
    B = 1
    BI = 2
    BW = 3
    R = 4
    NONE = 5


class NodeKind(IntEnum):
    COMPUTE = 0
    SEND = 1
    RECV = 2
    COLLECTIVE = 3
    UPDATE = 4
    NORM = 5


class Collective(IntEnum):
    """Kinds of group communication; ``NONE`` on every node that is not one."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    RING_EXCHANGE = 5


class Axis(IntEnum):
    """What a collective is for: the parallel dimension whose groups it runs over."""

    NONE = 0
    TENSOR = 1
    SEQUENCE = 2
    EXPERT = 3
    CONTEXT = 4
    DATA = 5
    TIE = 6
    NORM = 7


class Role(IntEnum):
    """What an edge carries. All but ``TEMPORAL`` are data edges."""

    ACTIVATION = 0
    GRADIENT = 1
    SAVED = 2
    STASH = 3
    PARAMETER = 4
    REDUCTION = 5
    MESSAGE = 6
    TEMPORAL = 7


class Region(StrEnum):
    EMBED = "embed"
    ATTENTION = "attention"
    MLP = "mlp"
    ROUTER = "router"
    EXPERT = "expert"
    HEAD = "head"


class ShardKind(StrEnum):
    EXPERT = "expert"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    CONTEXT = "context"


class Recompute(StrEnum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sync(StrEnum):
    """The barrier between steps (strategy header ``sync``)."""

    GLOBAL_NORM = "global_norm"
    NONE = "none"
    POST_VALIDATION = "post_validation"
