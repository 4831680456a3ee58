"""Close the step: tied gradients, the global norm, and one optimiser update for each stage on each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Ints, among
from piper_core.ir.edit import Growth
from piper_core.names import Axis, Collective, NodeKind, Phase, Role, Sync
from piper_core.passes.gradient_sync import stage_rows


def tie_groups(dag: Dag) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return, for each tie name, the (chunk, elements) that hold a copy of the tied parameter."""
    found: dict[str, list[tuple[int, int]]] = {}
    for index, chunk in enumerate(dag.chunks):
        for parameter in chunk.parameters:
            if parameter.tie:
                found.setdefault(parameter.tie, []).append((index, parameter.numel))
    return {name: tuple(held) for name, held in found.items() if len(held) > 1}


def close_step(dag: Dag) -> Dag:
    """Add tie reductions, Norm and Update nodes.

    Rewrite::

        BW of all microbatches -> [tie all_reduce] -> [reductions] -> [Norm] -> Update

    A tie group whose copies lie on different rows is reduced across those rows before the data reduction
    (after it under ZeRO-2/3, where the data reduction is a microbatch's: sums commute). Under ``global_norm``
    every Update depends on its row's Norm, an all_reduce over all rows.
    """
    nodes = dag.nodes
    if bool((nodes.kind == NodeKind.UPDATE).any()):
        return dag
    growth = Growth(dag)
    reductions = np.flatnonzero(
        (nodes.kind == NodeKind.COLLECTIVE) & (nodes.axis == Axis.DATA) & (nodes.phase == Phase.BW)
    )
    weight = np.flatnonzero(dag.compute & among(nodes.phase, (Phase.B, Phase.BW)))
    ties = _ties(dag, growth, reductions, weight)
    groups = np.concatenate([nodes.group[reductions], nodes.group[weight]])
    stages = np.concatenate([nodes.stage[reductions], nodes.stage[weight]])
    done = np.concatenate([reductions, weight])
    held = stage_rows(dag)
    updates: dict[tuple[int, int], int] = {}
    for stage in sorted(held):
        made = growth.add(len(held[stage]), kind=int(NodeKind.UPDATE), stage=stage, group=held[stage])
        updates.update({(stage, g): int(i) for g, i in zip(held[stage], made, strict=True)})
    table = np.full((dag.stages + 1, len(dag.groups) + 1), -1, np.int32)
    for (stage, group), update in updates.items():
        table[stage, group] = update
    growth.link(done, table[stages, groups], Role.REDUCTION)
    for tie, group, stage in ties:
        growth.link(np.asarray([tie]), np.asarray([updates[stage, group]]), Role.REDUCTION)
    if dag.sync is not Sync.NONE:
        rows = sorted({group for _, group in updates})
        made = growth.add(
            len(rows),
            kind=int(NodeKind.NORM),
            group=rows,
            collective=int(Collective.ALL_REDUCE),
            axis=int(Axis.NORM),
            payload=4.0,
        )
        norm_of = dict(zip(rows, made.tolist(), strict=True))
        of_group = np.full(len(dag.groups) + 1, -1, np.int32)
        of_group[rows] = made
        growth.link(done, of_group[groups], Role.REDUCTION)
        for tie, group, _ in ties:
            growth.link(np.asarray([tie]), np.asarray([norm_of[group]]), Role.REDUCTION)
        if dag.sync is Sync.GLOBAL_NORM:
            pairs = [(norm_of[group], update) for (_, group), update in updates.items()]
            src, dst = np.asarray(pairs, np.int32).T
            growth.link(src, dst, Role.REDUCTION)
    return growth.finish()


def _ties(dag: Dag, growth: Growth, reductions: Ints, weight: Ints) -> list[tuple[int, int, int]]:
    """Add a tie all_reduce on each row that holds a copy; return (node, group, stage) of those made."""
    nodes = dag.nodes
    made: list[tuple[int, int, int]] = []
    for name, held in tie_groups(dag).items():
        copies = []
        for chunk, numel in held:
            users = weight[nodes.chunk[weight] == chunk]
            if len(set(nodes.group[users].tolist())) > 1:
                raise DirectiveError(
                    f"tied parameter {name} on a stage that lives on two rows",
                    hint="untie it, or place its stages on one row each",
                )
            copies.append((users, numel))
        rows = {int(nodes.group[users[0]]) for users, _ in copies}
        if len(rows) < 2:
            continue
        for users, numel in copies:
            first = int(users[0])
            stage, group = int(nodes.stage[first]), int(nodes.group[first])
            state = dag.states[nodes.state[first]]
            size = numel // state.tensor_degree
            bucket = _bucket(dag, int(nodes.chunk[first]), name, state.tensor_degree)
            late = state.zero_stage >= 2 and dag.buckets[bucket].ranks > 1
            if late:
                size = -(-size // dag.buckets[bucket].ranks)
            node = growth.add(
                1,
                kind=int(NodeKind.COLLECTIVE),
                phase=int(Phase.BW),
                chunk=int(nodes.chunk[first]),
                stage=stage,
                group=group,
                collective=int(Collective.ALL_REDUCE),
                axis=int(Axis.TIE),
                payload=4.0 * size,
                bucket=bucket,
                state=int(nodes.state[first]),
            )
            mates = [c for c, _ in dag.buckets[bucket].parts]
            users = weight[np.isin(nodes.chunk[weight], mates) & (nodes.group[weight] == group)]
            own = reductions[(nodes.bucket[reductions] == bucket) & (nodes.group[reductions] == group)]
            if late:
                growth.link(own, np.repeat(node, len(own)), Role.REDUCTION)
            else:
                growth.link(users, np.repeat(node, len(users)), Role.REDUCTION)
                growth.link(np.repeat(node, len(own)), own, Role.REDUCTION)
            made.append((int(node[0]), group, stage))
    return made


def _bucket(dag: Dag, chunk: int, tie: str, tensor_degree: int) -> int:
    """Return the bucket that holds the tied parameter of a chunk; buckets hold a chunk's parameters in order."""
    start = 0
    for parameter in dag.chunks[chunk].parameters:
        if parameter.tie == tie:
            break
        start += parameter.numel // (tensor_degree if parameter.tensor else 1)
    for index, bucket in enumerate(dag.buckets):
        for held, numel in bucket.parts:
            if held == chunk:
                if start < numel:
                    return index
                start -= numel
    raise AssertionError("every parameter lies in a bucket")


def with_row(dag: Dag) -> Dag:
    """Place everything on one rank when no directive placed anything."""
    if dag.groups or len(dag) == 0:
        return dag
    return replace(dag, nodes=dag.nodes.with_(group=0), groups=((0,),))
