"""Directives: the seven things that a program can say, one a file (see the README's table)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from piper_core.directives.base import Directive, Domain
from piper_core.directives.order import Order
from piper_core.directives.place import Place
from piper_core.directives.recompute import RecomputeDirective
from piper_core.directives.replicate import Replicate
from piper_core.directives.shard import Shard
from piper_core.directives.split import Split
from piper_core.directives.stage import Stage
from piper_core.errors import DirectiveError

CANONICAL: tuple[type[Directive[Any]], ...] = (Stage, Split, Place, Shard, Replicate, RecomputeDirective, Order)
"""The kinds of directive in the order in which a program applies them (backward lowering comes after split)."""

OPS: Mapping[str, type[Directive[Any]]] = {kind.op: kind for kind in CANONICAL}

__all__ = [
    "CANONICAL",
    "OPS",
    "Directive",
    "Domain",
    "Order",
    "Place",
    "RecomputeDirective",
    "Replicate",
    "Shard",
    "Split",
    "Stage",
    "parse_directive",
]


def parse_directive(data: object) -> Directive[Any]:
    """Read one directive from its JSON form.

    Raises:
        DirectiveError: not an object, no known ``op``, or fields that are missing, unknown or of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise DirectiveError(
            "a directive is not an object", expected='such as {"op": "place", ...}', found=repr(data)[:60]
        )
    op = data.get("op")
    if not isinstance(op, str) or op not in OPS:
        near = get_close_matches(str(op).lower(), OPS, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise DirectiveError(f"unknown op {op!r}"[:80], expected="one of " + ", ".join(OPS), hint=hint)
    return OPS[op].parse(data)
