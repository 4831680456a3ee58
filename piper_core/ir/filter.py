"""Filters: conjunctions of tag conditions that select nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import ABSENT, Dag, Ints, Mask
from piper_core.names import Collective, NodeKind, Phase, Region

Value: TypeAlias = int | str | tuple[int | str, ...]

_PASSES = ("F", "B", "BI", "BW", "R")
_COMMS = (*(kind.name.lower() for kind in Collective if kind), "send", "recv")


@dataclass(frozen=True, slots=True)
class Filter:
    """A conjunction ``{tag: value}``; the empty one matches every compute node.

    A value is an int, ``"*"`` (any), ``"-"`` (not inside that tag), a list of values, or a range ``"a-b"``
    (both ends included). ``PASS`` takes F, B, BI, BW, R; ``REGION`` a region name; ``COMM`` (an extension)
    selects communication nodes by kind instead of compute.
    """

    items: tuple[tuple[str, Value], ...]

    @staticmethod
    def parse(data: object) -> Filter:
        """Check the form of a JSON filter.

        Raises:
            DirectiveError: not an object, or a value of the wrong form.
        """
        if not isinstance(data, Mapping):
            raise DirectiveError("filter is not an object", expected='tags such as {"PP": 0}', found=repr(data)[:60])
        return Filter(tuple((str(tag), _value(str(tag), value)) for tag, value in data.items()))

    def to_data(self) -> dict[str, Any]:
        """Return the JSON form; the inverse of :meth:`parse`."""
        return {tag: list(value) if isinstance(value, tuple) else value for tag, value in self.items}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{tag}: {_text(value)}" for tag, value in self.items) + "}"

    @property
    def phases(self) -> tuple[str, ...]:
        """The PASS values that it names."""
        for tag, value in self.items:
            if tag == "PASS":
                return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)
        return ()

    def without(self, *tags: str) -> Filter:
        """Return the filter less the conditions on ``tags``."""
        return Filter(tuple(item for item in self.items if item[0] not in tags))

    def mask(self, dag: Dag) -> Mask:
        """Return which nodes match, shape (n,).

        Raises:
            DirectiveError: a tag that no node carries.
        """
        nodes = dag.nodes
        conditions = dict(self.items)
        if "COMM" in conditions:
            mask = _comm_mask(dag, conditions["COMM"])
        else:
            mask = dag.compute
        for tag, value in self.items:
            if tag == "COMM":
                continue
            if tag == "PASS":
                names = value if isinstance(value, tuple) else (value,)
                wanted: list[int] | range | None = [int(Phase[str(name)]) for name in names]
                column: Ints = nodes.phase
            elif tag == "REGION":
                names = value if isinstance(value, tuple) else (value,)
                regions = np.asarray([*(str(c.region) in names for c in dag.chunks), False])
                mask = mask & regions[nodes.chunk]
                continue
            elif tag == "PP" and bool((nodes.stage >= 0).any()):
                column, wanted = np.where(nodes.stage < 0, ABSENT, nodes.stage), _wanted(value)
            elif dag.microbatches and tag == dag.split_name:
                column, wanted = np.where(nodes.microbatch < 0, ABSENT, nodes.microbatch), _wanted(value)
            elif tag in dag.tag_names():
                column, wanted = dag.chunk_tag(tag)[nodes.chunk], _wanted(value)
            else:
                raise DirectiveError(
                    f"unknown tag {tag!r} in filter {self}",
                    expected="one of " + ", ".join(dag.tag_names()),
                    hint=_tag_hint(tag),
                )
            if isinstance(wanted, range):
                mask = mask & (column >= wanted.start) & (column < wanted.stop)
            elif wanted is None:
                mask = mask & (column != ABSENT)
            elif len(wanted) == 1:
                mask = mask & (column == wanted[0])
            else:
                mask = mask & np.isin(column, wanted)
        return np.asarray(mask)

    def select(self, dag: Dag) -> Mask:
        """Return :meth:`mask`, refusing a filter that matches nothing."""
        mask = self.mask(dag)
        if not mask.any():
            raise DirectiveError(f"filter {self} matches nothing", hint=_range_hint(dag))
        return mask


def _value(tag: str, value: object) -> Value:
    if value is None and tag not in ("PASS", "REGION", "COMM"):
        return "-"
    if isinstance(value, bool | float):
        raise DirectiveError(
            f"filter value of {tag} has the wrong type", expected='an int, "*", "-", a list or "a-b"', found=repr(value)
        )
    if tag in ("PASS", "REGION", "COMM"):
        allowed = {"PASS": _PASSES, "REGION": tuple(map(str, Region)), "COMM": _COMMS}[tag]
        names = value if isinstance(value, list | tuple) else [value]
        for name in names:
            if name not in allowed:
                raise DirectiveError(f"unknown {tag} {name!r}", expected="one of " + ", ".join(allowed))
        return tuple(map(str, names)) if isinstance(value, list | tuple) else str(value)
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        if value in ("*", "-"):
            return value
        low, dash, high = value.partition("-")
        if low.isdecimal() and len(low) < 10 and (not dash or (high.isdecimal() and len(high) < 10)):
            if not dash:
                return int(low)
            if int(low) <= int(high):
                return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return tuple(value)
    raise DirectiveError(
        f"filter value of {tag} has the wrong form",
        expected='an int, "*", "-", a list or "a-b"',
        found=repr(value)[:60],
    )


def _text(value: Value) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)


def _wanted(value: Value) -> list[int] | range | None:
    """Return the values to match, None for any."""
    if isinstance(value, tuple):
        return [int(v) for v in value]
    if isinstance(value, int):
        return [value]
    if value == "*":
        return None
    if value == "-":
        return [ABSENT]
    low, _, high = value.partition("-")
    return range(int(low), int(high) + 1)


def _comm_mask(dag: Dag, value: Value) -> Mask:
    nodes = dag.nodes
    mask = np.zeros(len(nodes), np.bool_)
    for name in value if isinstance(value, tuple) else (value,):
        if name in ("send", "recv"):
            mask |= nodes.kind == NodeKind[str(name).upper()]
        else:
            mask |= (nodes.kind == NodeKind.COLLECTIVE) & (nodes.collective == Collective[str(name).upper()])
    return mask


def _tag_hint(tag: str) -> str:
    if tag == "PP":
        return "add a stage directive, or annotate the model with PP"
    if tag == "MB":
        return "add a split directive"
    return "check the annotation's spelling"


def _range_hint(dag: Dag) -> str:
    parts = []
    if dag.stages:
        parts.append(f"PP is 0-{dag.stages - 1}")
    if dag.microbatches:
        parts.append(f"{dag.split_name} is 0-{dag.microbatches - 1}")
    parts.append(f"LAYER is -1-{dag.model.layers}")
    phases = sorted({int(p) for p in dag.nodes.phase[dag.compute]})
    parts.append("PASS is " + ", ".join(Phase(p).name for p in phases))
    return "; ".join(parts)
