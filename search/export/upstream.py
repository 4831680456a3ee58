"""Upstream Piper's JSON, and the annotations that its model needs to carry the tags that the program names."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

from piper_core.directives import Directive, Order, RecomputeDirective, Replicate, Shard, Stage
from piper_core.errors import ConfigError
from piper_core.ir.filter import Filter
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.upstream import to_upstream
from search.export.base import Export
from search.export.job import Job

PROGRAM, ANNOTATIONS = "program.json", "annotations.json"


def export(job: Job) -> Export:
    """Return ``program.json`` and ``annotations.json``: stages as tags of the model, axes as lists of ranks.

    Raises:
        ConfigError, DirectiveError: a directive that upstream cannot express in any way.
    """
    lost: list[str] = []
    made: list[Directive[Any]] = []
    for directive in job.strategy.program.directives:
        made += _kept(job, directive, lost)
    data = to_upstream(Program(tuple(made)))
    experts = any("EP" in each.get("filter", {}) for each in data)
    header = job.strategy.header
    if str(header.sync) != "none":
        lost.append("gradient clipping by global norm: upstream has no barrier between steps")
    text = "[\n" + ",\n".join("  " + json.dumps(each) for each in data) + "\n]\n"
    return Export(
        {PROGRAM: text, ANNOTATIONS: _annotations(job, experts)},
        tuple(dict.fromkeys(lost)),
        (f"upstream takes stages from the model: annotate what each stage computes with PP, once each in this order, "
         f"as {ANNOTATIONS} says" + (", and the experts of each mixture layer with EP" if experts else ""),),
    )  # fmt: skip


def _kept(job: Job, directive: Directive[Any], lost: list[str]) -> list[Directive[Any]]:
    """Return what upstream says in place of a directive, and add what that loses."""
    match directive:
        case Stage():
            return []
        case RecomputeDirective():
            lost.append(f"recompute ({directive.policy}) of {directive.filter.to_data() or 'everything'}")
            return []
        case Replicate() | Shard():
            return _replicated(job, directive, lost)
        case Order() if directive.actions:
            rows = []
            for row, slots in directive.actions:
                if any(action.kind == "R" for slot in slots for action in slot):
                    lost.append("the place of recompute in the order")
                kept = tuple(tuple(action for action in slot if action.kind != "R") for slot in slots)
                rows.append((row, tuple(slot for slot in kept if slot)))
            lost.append("that each row's order is complete: upstream's order directive claims nothing of the kind")
            return [replace(directive, actions=tuple(rows))]
        case _:
            return [directive]


def _replicated(job: Job, directive: Replicate | Shard, lost: list[str]) -> list[Directive[Any]]:
    """One directive for each stage and group of ranks, with the ranks written out."""
    if isinstance(directive, Shard) and directive.kind != "expert":
        raise ConfigError(
            f"upstream Piper has no {directive.kind} parallelism: export a strategy with tp and cp of 1, or to "
            "torchtitan or megatron"
        )
    changes: dict[str, Any] = {"axis": None}
    if isinstance(directive, Replicate):
        if directive.shard_optimizer:
            lost.append("ZeRO-1 (shard_optimizer): the optimizer state is whole on every rank")
            changes["shard_optimizer"] = False
        if directive.prefetch != 1:
            lost.append(f"prefetch {directive.prefetch}: upstream gathers one bucket ahead")
            changes["prefetch"] = 1
    mesh = job.strategy.header.world
    groups = directive.devices or (_axis_groups(mesh, directive.axis) if mesh and directive.axis else ())
    rows = job.compiled.plan.rows
    found: list[Directive[Any]] = []
    tags = tuple(("EP", "*") if item == ("REGION", "expert") else item for item in directive.filter.items)
    if len(groups) == 1:
        return [replace(directive, filter=Filter(tags), devices=groups, **changes)]
    if "PP" in dict(tags):
        raise ConfigError(f"directive {directive.to_data()} names PP and several groups; write one for each stage")
    for stage, held in enumerate(job.rows_of):
        inside = [group for group in groups if any(set(group) <= set(rows[row]) for row in held)]
        if len(inside) != 1:
            raise ConfigError(
                f"upstream Piper has one flat list of ranks for a directive, and stage {stage} needs "
                f"{len(inside)} groups; no counterpart there"
            )
        filter_ = Filter((("PP", stage), *tags))
        found.append(replace(directive, filter=filter_, devices=(tuple(inside[0]),), **changes))
    return found


def _axis_groups(mesh: Mesh, axis: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in mesh.groups(*axis.split("+")))


def _annotations(job: Job, experts: bool) -> str:
    first = [0, *accumulate(job.layers)]
    stages = [
        {"PP": stage, "first_layer": first[stage], "last_layer": first[stage + 1] - 1, "embedding": stage == 0,
         "head": stage == job.stages - 1}
        for stage in range(job.stages)
    ]  # fmt: skip
    tags = {"model": job.name, "PP": stages} | ({"EP": "around the experts of each mixture layer"} if experts else {})
    return json.dumps(tags, indent=1) + "\n"
