"""Check that every rank gets the data and the gradients that its part of the model needs."""

from __future__ import annotations

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, among
from piper_core.ir.edit import distinct
from piper_core.ir.shard_state import Ranks, ShardState
from piper_core.names import Role


def check_layout(dag: Dag) -> Dag:
    """Return ``dag``, having refused a division of work that would compute wrong gradients.

    A chunk is divided alike for all its microbatches and on all rows that hold it, since they share its parameters;
    data flows between ranks that hold the same slice of batch and sequence, since nothing reshards it; and ranks
    that share experts hold different tokens, since each of them sends its own.

    Raises:
        DirectiveError: naming the chunks or the ranks.
    """
    _one_state(dag)
    _same_slices(dag)
    _own_tokens(dag)
    return dag


def _pairs(dag: Dag) -> list[tuple[int, int, int]]:
    """Return the distinct (chunk, group, state) of compute."""
    nodes, index = dag.nodes, np.flatnonzero(dag.compute)
    key = nodes.chunk[index].astype(np.int64) * len(dag.groups) + nodes.group[index]
    key = key * len(dag.states) + nodes.state[index]
    rest, state = np.divmod(distinct(key), len(dag.states))
    chunk, group = np.divmod(rest, len(dag.groups))
    return list(zip(chunk.tolist(), group.tolist(), state.tolist(), strict=True))


def _one_state(dag: Dag) -> None:
    """Refuse a chunk whose microbatches, or rows, are divided differently."""
    degrees: dict[tuple[int, int], tuple[object, ...]] = {}
    on_row: dict[tuple[int, int], int] = {}
    of_chunk: dict[int, tuple[object, ...]] = {}
    for chunk, group, index in _pairs(dag):
        name, row, state = dag.chunks[chunk].name, dag.groups[group], dag.states[index]
        if on_row.setdefault((chunk, group), index) != index:
            raise DirectiveError(
                f"shard or replicate divides {name} differently for some of its microbatches",
                expected=f"one division on row {list(row)[:8]}: its microbatches share its parameters",
                hint=f"drop {dag.split_name} from the filter",
            )
        if (index, group) not in degrees:
            degrees[index, group] = _degrees(state, row)
        mine = degrees[index, group]
        if (known := of_chunk.setdefault(chunk, mine)) is not mine and known != mine:
            raise DirectiveError(
                f"{name} lies on rows that divide it differently",
                expected="the same degrees and ZeRO stage on every row that holds a stage",
            )


def _degrees(state: ShardState, row: Ranks) -> tuple[object, ...]:
    """Return what rows that hold one stage must agree on."""
    bucket = state.replication.bucket_bytes if state.replication else 0
    return (
        state.tensor_places(row),
        state.sequence,
        state.expert_degree,
        state.context_degree,
        state.zero_stage,
        state.data_degree(row),
        bucket,
    )


def _same_slices(dag: Dag) -> None:
    """Refuse data that flows, at some position of a row, to a rank which needs another part of it."""
    nodes, edges = dag.nodes, dag.edges
    flows = np.flatnonzero(among(edges.role, (Role.ACTIVATION, Role.GRADIENT, Role.MESSAGE)))
    ends = [column[side[flows]] for side in (edges.src, edges.dst) for column in (nodes.state, nodes.group)]
    differ = np.flatnonzero((ends[0] != ends[2]) | (ends[1] != ends[3]))
    key = np.zeros(len(differ), np.int64)
    for column, width in zip(ends, (len(dag.states), len(dag.groups)) * 2, strict=True):
        key = key * width + column[differ]
    slices: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
    for i in np.unique(key, return_index=True)[1].tolist():
        u, v = (int(side[flows[differ[i]]]) for side in (edges.src, edges.dst))
        for at in ((int(nodes.state[n]), int(nodes.group[n])) for n in (u, v)):
            if at not in slices:
                slices[at] = dag.states[at[0]].slices(dag.groups[at[1]])
        held, needed = (slices[int(nodes.state[n]), int(nodes.group[n])] for n in (u, v))
        if held != needed:
            a, b = (f"{dag.chunks[nodes.chunk[n]].name} of stage {max(0, nodes.stage[n])}" for n in (u, v))
            raise DirectiveError(
                f"{a} and {b} divide the batch or the sequence over their ranks differently",
                expected="the same replicate, context and sequence groups, position by position, where data flows",
            )


def _own_tokens(dag: Dag) -> None:
    """Refuse expert groups whose ranks hold the same tokens: each would send all of them."""
    for _, group, index in _pairs(dag):
        state, row = dag.states[index], dag.groups[group]
        if not state.expert:
            continue
        slices = dict(zip(row, state.slices(row), strict=True))
        for members in state.expert:
            mine = [slices[rank] for rank in members if rank in slices]
            if len(set(mine)) < len(mine):
                raise DirectiveError(
                    f"experts are sharded over ranks {list(members)[:8]}, some of which hold the same tokens",
                    expected="ranks between which replicate, context or sequence sharding divides the batch",
                    hint="replicate over these ranks, or choose expert groups across the replicas",
                )
