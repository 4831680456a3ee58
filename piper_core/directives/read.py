"""Reading a directive's JSON fields, with an error that says what was expected of which field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from piper_core.errors import DirectiveError
from piper_core.ir.filter import Filter
from piper_core.ir.shard_state import Groups

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

_MAX_RANK = 10**7


def check_fields(data: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Refuse missing and unknown fields.

    Raises:
        DirectiveError: naming the field and those that are allowed.
    """
    for name in required:
        if name not in data:
            raise DirectiveError(f"field {name!r} is missing", expected="fields " + ", ".join((*required, *optional)))
    for name in data:
        if name != "op" and name not in required and name not in optional:
            raise DirectiveError(f"unknown field {name!r}", expected="one of " + ", ".join((*required, *optional)))


def read_filter(data: Mapping[str, Any]) -> Filter:
    return Filter.parse(data["filter"])


def read_int(data: Mapping[str, Any], name: str, *, least: int, default: int | None = None) -> int:
    """Return an integer field of at least ``least``."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_RANK:
        raise DirectiveError(f"{name} is out of range", expected=f"an integer >= {least}", found=repr(value)[:40])
    return value


def read_bool(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise DirectiveError(f"{name} has the wrong type", expected="true or false", found=repr(value)[:40])
    return value


def read_text(data: Mapping[str, Any], name: str, default: str | None) -> str | None:
    value = data.get(name, default)
    if value is not None and (not isinstance(value, str) or not value or len(value) > 100):
        raise DirectiveError(f"{name} has the wrong type", expected="a short text", found=repr(value)[:40])
    return value


def read_ints(data: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Return a list of integers, None where the field is absent."""
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(
        isinstance(v, int) and not isinstance(v, bool) and abs(v) <= _MAX_RANK for v in value
    ):
        raise DirectiveError(f"{name} has the wrong type", expected="a list of integers", found=repr(value)[:60])
    return tuple(value)


def read_devices(data: Mapping[str, Any]) -> Groups:
    """Return the groups of ``devices``: a flat list is one group, a list of lists several equal ones.

    Raises:
        DirectiveError: empty, not ranks, repeated ranks, or groups of different sizes.
    """
    name = "devices" if "devices" in data else "device"
    value = data.get(name)
    if not isinstance(value, list | tuple) or not value:
        raise DirectiveError(
            f"{name} is not a list of ranks", expected="such as [0, 1] or [[0, 1], [2, 3]]", found=repr(value)[:60]
        )
    nested = isinstance(value[0], list | tuple)
    groups: list[tuple[int, ...]] = []
    for group in value if nested else [value]:
        ranks = read_ints({name: group if isinstance(group, list | tuple) else [None]}, name) or ()
        if not ranks or min(ranks) < 0:
            raise DirectiveError(f"{name} holds a rank out of range", expected="ranks >= 0", found=repr(group)[:60])
        groups.append(ranks)
    flat = [rank for group in groups for rank in group]
    if len(set(flat)) != len(flat):
        twice = next(rank for rank in flat if flat.count(rank) > 1)
        raise DirectiveError(f"{name} has overlapping groups: rank {twice} is named twice", expected="disjoint groups")
    if len({len(group) for group in groups}) > 1:
        raise DirectiveError(
            f"{name} has unequal groups",
            expected="groups of one size",
            found=", ".join(map(str, sorted({len(g) for g in groups}))) + " ranks",
        )
    return tuple(groups)


def write_devices(groups: Groups) -> list[Any]:
    """Return the JSON form of device groups."""
    return list(groups[0]) if len(groups) == 1 else [list(group) for group in groups]


def resolve(groups: Groups, axis: str | None, mesh: Mesh | None) -> Groups:
    """Return the groups of ranks that ``devices`` or ``axis`` stand for, all inside the mesh.

    Raises:
        DirectiveError: an axis without a mesh or unknown to it; a rank outside the mesh.
    """
    if axis is not None:
        if mesh is None:
            raise DirectiveError(f"axis {axis!r} needs a mesh", hint="give the header a mesh, or use devices")
        names = axis.split("+")
        for name in names:
            if name not in mesh.names or names.count(name) > 1:
                raise DirectiveError(
                    f"unknown mesh axis {name!r}",
                    expected="one of " + ", ".join(mesh.names) + ", or several joined by +",
                )
        return mesh.groups(*names)
    if mesh is not None and groups:
        size = mesh.size
        for group in groups:
            if max(group) >= size:
                rank = next(rank for rank in group if rank >= size)
                raise DirectiveError(f"rank {rank} is out of range", expected=f"0-{size - 1} (mesh {mesh})")
    return groups


def rows_inside(groups: Groups, row: tuple[int, ...], what: str) -> Groups:
    """Return the groups that lie in ``row``, which they must cover exactly.

    Raises:
        DirectiveError: a group that is partly outside the row, or a rank of the row in no group.
    """
    members = set(row)
    inside = tuple(group for group in groups if members.issuperset(group))
    for group in groups:
        if members.intersection(group) and group not in inside:
            raise DirectiveError(
                f"{what} group {list(group)} is only partly in row {list(row)}",
                expected="each group inside one placement",
            )
    missing = members.difference(rank for group in inside for rank in group)
    if missing:
        raise DirectiveError(
            f"{what} groups leave out rank {min(missing)} of row {list(row)}",
            expected="groups that cover the placement",
        )
    return inside
