"""One group of ranks for each way in which the groups of an axis lie on nodes: all that prices need of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from piper_core.ir.dag import Ints
from piper_core.mesh import Mesh
from search.stage_costs import ranks_of

Ranks: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, int, int, int]
Several: TypeAlias = tuple[tuple[Shape, Ranks], ...]
"""Groups that lie on nodes in different ways: size, nodes, fewest and most members in one; and the first such group."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The groups of one row, or of two rows that hold one stage together, by what they are for."""

    tensor: Several
    context: Several
    expert: Several
    dense_sync: Several
    expert_sync: Several


@lru_cache(maxsize=4096)
def row_groups(mesh: Mesh, rows: tuple[int, ...], gpus_per_node: int) -> RowGroups:
    """Return the groups of some rows of a mesh of ``stage_costs.mesh_of``."""
    held = ranks_of(mesh).rows
    shape = (len(rows), mesh.degree("dp") * mesh.degree("edp"), mesh.degree("ep"), mesh.degree("cp"), mesh.degree("tp"))
    grid = np.asarray([held[row] for row in rows]).reshape(shape)
    inner = grid[0]

    def along(table: Ints, *axes: int) -> Several:
        others = [axis for axis in range(table.ndim) if axis not in axes]
        size = int(np.prod([table.shape[axis] for axis in axes]))
        return distinct(table.transpose(*others, *axes).reshape(-1, size), gpus_per_node)

    return RowGroups(along(inner, 3), along(inner, 2), along(inner, 1), along(grid, 0, 1, 2, 3), along(grid, 0, 1, 3))


@lru_cache(maxsize=4096)
def pair_groups(mesh: Mesh, rows: tuple[int, ...], gpus_per_node: int) -> Several:
    """Return the groups of ranks at equal positions of some rows."""
    held = ranks_of(mesh).rows
    return distinct(np.asarray([held[row] for row in rows]).T, gpus_per_node)


@lru_cache(maxsize=4096)
def everyone(ranks: int, gpus_per_node: int) -> Several:
    """Return the group of all ranks."""
    return distinct(np.arange(ranks).reshape(1, -1), gpus_per_node)


def distinct(groups: Ints, gpus_per_node: int) -> Several:
    """Return the shapes of some groups of one size, shape (groups, size), each with the first group that has it."""
    size = groups.shape[1]
    node = np.sort(groups // gpus_per_node, axis=1)
    starts = np.ones(node.shape, np.bool_)
    starts[:, 1:] = node[:, 1:] != node[:, :-1]
    found: dict[Shape, Ranks] = {}
    relative = node - node[:, :1]
    same = (relative == relative[0]).all(axis=1)
    for i in [0, *np.flatnonzero(~same).tolist()]:
        counts = np.diff(np.append(np.flatnonzero(starts[i]), size))
        shape = (size, len(counts), int(counts.min()), int(counts.max()))
        if shape not in found:
            found[shape] = tuple(groups[i].tolist())
    return tuple(found.items())


def first_members(groups: Several, count: int, gpus_per_node: int) -> Several:
    """Return the first ``count`` members of each group, or all of them where it has no more."""
    if count >= groups[0][0][0]:
        return groups
    return distinct(np.asarray([ranks[:count] for _, ranks in groups]), gpus_per_node)
