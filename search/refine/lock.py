"""Locks: what a refinement must leave as it is, said as a field of the strategy or as a filter on the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

import numpy as np

from piper_core.directives import Replicate, Shard, Stage
from piper_core.errors import ConfigError
from piper_core.ir.action import PHASE_OF_KIND
from piper_core.ir.dag import Dag
from piper_core.ir.filter import Filter
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled
from search.slots import compute_slots

_PAIR = re.compile(r"([A-Za-z_]\w*)=(\*|-|\d+(?:-\d+)?|[A-Za-z]+)")


def _of(op: str) -> Callable[[Strategy], object]:
    return lambda strategy: [each.to_data() for each in strategy.program.directives if each.op == op]


def _each(kind: type[Any], *names: str) -> Callable[[Strategy], object]:
    def read(strategy: Strategy) -> object:
        found = (each for each in strategy.program.directives if isinstance(each, kind))
        return [tuple(getattr(each, name) for name in names) for each in found]

    return read


def _axis(*names: str) -> Callable[[Strategy], object]:
    def read(strategy: Strategy) -> object:
        mesh = strategy.header.mesh
        return prod(mesh.degree(name) for name in names) if mesh else None

    return read


FIELDS: Mapping[str, Callable[[Strategy], object]] = {
    **{op: _of(op) for op in ("stage", "split", "place", "shard", "replicate", "recompute", "order")},
    "layers": _each(Stage, "layers_per_stage", "cuts", "stages"),
    "micro_batch": _of("split"),
    "num_microbatches": _of("split"),
    **{axis: _axis(axis) for axis in ("pp", "tp", "cp", "ep")},
    "dp": _axis("dp", "edp", "ep"),
    "mesh": lambda strategy: strategy.header.mesh,
    "schedule": lambda strategy: strategy.header.schedule,
    "zero": _each(Replicate, "shard_optimizer", "shard_grads", "shard_params"),
    "bucket_size": _each(Replicate, "bucket_size"),
    "prefetch": _each(Replicate, "prefetch"),
    "sequence_parallel": _each(Shard, "kind"),
}
"""Fields that can be locked, and what of a strategy each one is."""


@dataclass(frozen=True, slots=True)
class Locks:
    """Fields and filters that hold, and what they were at the start."""

    fields: Mapping[str, object]
    filters: tuple[tuple[Filter, object], ...]

    @staticmethod
    def of(texts: Sequence[str], strategy: Strategy, compiled: Compiled) -> Locks:
        """Read ``--lock`` options: ``zero``, ``order``, ``PP=0``, ``PP=0-1,MB=3`` or ``{"PP": 0}``.

        Raises:
            ConfigError: neither a field nor a filter; DirectiveError: a filter that matches nothing.
        """
        fields: dict[str, object] = {}
        filters: list[tuple[Filter, object]] = []
        for text in texts:
            name = text.strip().replace("-", "_")
            if name in FIELDS:
                fields[name] = FIELDS[name](strategy)
                continue
            filter_ = _filter(text)
            filter_.select(compiled.dag)
            filters.append((filter_, _signature(filter_, compiled)))
        return Locks(fields, tuple(filters))

    def keeps(self, strategy: Strategy) -> bool:
        """Return whether the fields of a strategy are as they were."""
        return all(FIELDS[name](strategy) == value for name, value in self.fields.items())

    def keeps_compiled(self, compiled: Compiled) -> bool:
        """Return whether all that the filters match is as it was: where and how it runs, and its order on its row."""
        return all(_signature(filter_, compiled) == value for filter_, value in self.filters)


def _filter(text: str) -> Filter:
    """Read a filter.

    Raises:
        ConfigError: it is none, with the nearest field.
    """
    if text.lstrip().startswith("{"):
        try:
            return Filter.parse(json.loads(text))
        except ValueError:
            raise ConfigError(f"--lock {text[:60]!r} is no JSON") from None
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        near = get_close_matches(text.strip(), FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
        raise ConfigError(f"--lock {text[:60]!r} is no field and no filter such as PP=0 or PP=1,MB=0-3; {hint}")
    items = {match[1]: int(match[2]) if match[2].isdecimal() else match[2] for match in pairs if match}
    return Filter.parse(items)


def _signature(filter_: Filter, compiled: Compiled) -> object:
    """Return what decides how the matched compute runs: its nodes with their stage, ranks, sharding and recompute, and
    the order of its actions on each row."""
    dag, plan = compiled.dag, compiled.plan
    index = np.flatnonzero(filter_.mask(dag) & dag.compute)
    nodes = dag.nodes
    table = zip(
        nodes.chunk[index].tolist(), nodes.phase[index].tolist(), nodes.microbatch[index].tolist(),
        nodes.stage[index].tolist(), nodes.group[index].tolist(), nodes.state[index].tolist(),
        nodes.policy[index].tolist(), strict=True,
    )  # fmt: skip
    held = {(c, p, m, s, dag.groups[g], dag.states[t], policy) for c, p, m, s, g, t, policy in table}
    return frozenset(held), _orders(dag, index, compiled, len(plan.rows))


def _orders(dag: Dag, index: Any, compiled: Compiled, rows: int) -> tuple[tuple[str, ...], ...]:
    nodes = dag.nodes
    matched = set(
        zip(np.maximum(nodes.stage[index], 0).tolist(), nodes.phase[index].tolist(),
            np.maximum(nodes.microbatch[index], 0).tolist(), strict=True)
    )  # fmt: skip
    return tuple(
        tuple(
            str(action)
            for slot in compute_slots(compiled.plan, row)
            for action in slot
            if (action.stage, int(PHASE_OF_KIND[action.kind]), action.microbatch or 0) in matched
        )
        for row in range(rows)
    )
