"""order: temporal edges between groups of compute, or the total order of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import check_fields
from piper_core.errors import DirectiveError
from piper_core.ir.action import COMPUTE_KINDS, KIND_OF_PHASE, PHASE_OF_KIND, Action, Slot, format_slots, parse_slots
from piper_core.ir.dag import Dag, Edges, Ints, Mask
from piper_core.ir.edit import rows
from piper_core.ir.filter import Filter
from piper_core.ir.macro import Macros, cycle, inner_position, macros, project, topological
from piper_core.names import Phase, Role

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

Key: TypeAlias = tuple[int, int, int]
_MAX_EDGES = 2_000_000


@dataclass(frozen=True, slots=True)
class OrderEdit:
    """Temporal edges (node indices), overlap groups of (stage, phase, microbatch), and the group whose total
    order this claims (none for filters)."""

    src: Ints
    dst: Ints
    overlaps: tuple[tuple[Key, ...], ...]
    total: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order(Directive[OrderEdit]):
    """Say what runs before what.

    Rewrite::

        filters [[{PP: 0, MB: 0, PASS: F}], [{PP: 0, MB: 1, PASS: F}]]    adds  last(0F0) -> first(0F1)
        actions {0: "0F0 0F1 (0F2 0B0) 0B1 ..."}                          the same for a whole row

    Filters in one group (actions in parentheses) may overlap. Filters select compute unless they name COMM;
    partial orders are completed by the list scheduler; ``actions`` claims the total order of its rows.
    """

    op: ClassVar[str] = "order"
    filters: tuple[tuple[Filter, ...], ...] = ()
    actions: tuple[tuple[int, tuple[Slot, ...]], ...] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Order:
        if "actions" in data:
            check_fields(data, ("actions",))
            return cls(actions=_read_actions(data["actions"]))
        check_fields(data, ("filters",), ("actions",))
        groups = data["filters"]
        if not isinstance(groups, list | tuple) or len(groups) < 2:
            raise DirectiveError(
                "filters is too short",
                expected="two or more groups of filters, such as [[{...}], [{...}]]",
                found=repr(groups)[:60],
            )
        read: list[tuple[Filter, ...]] = []
        for i, group in enumerate(groups):
            if not isinstance(group, list | tuple) or not group:
                raise DirectiveError(
                    f"group {i} of filters is not a list of filters",
                    expected="such as [[{...}], [{...}]]",
                    found=repr(group)[:60],
                )
            read.append(tuple(Filter.parse(item) for item in group))
        return cls(filters=tuple(read))

    def to_data(self) -> dict[str, Any]:
        if self.actions:
            return {"op": self.op, "actions": {str(row): format_slots(slots) for row, slots in self.actions}}
        return {"op": self.op, "filters": [[filter_.to_data() for filter_ in group] for group in self.filters]}

    def lowered(self) -> Iterator[tuple[Filter, str]]:
        """Yield (filter without PASS, PASS) for everything that this order says of BI or BW."""
        for group in self.filters:
            for filter_ in group:
                for phase in filter_.phases:
                    if phase in ("BI", "BW"):
                        yield filter_.without("PASS"), phase

    def check(self, dag: Dag, mesh: Mesh | None = None) -> OrderEdit:
        if (dag.nodes.group[dag.compute] < 0).any():
            raise DirectiveError("order comes before place", expected="compute that is placed", hint="place it first")
        return self._check_actions(dag) if self.actions else self._check_filters(dag)

    def _check_filters(self, dag: Dag) -> OrderEdit:
        found = _separate(dag)
        position = inner_position(dag)
        ends: list[tuple[Ints, Ints]] = []
        overlaps: list[tuple[Key, ...]] = []
        for group in self.filters:
            first: list[Ints] = []
            last: list[Ints] = []
            keys: list[Key] = []
            for filter_ in group:
                index = np.flatnonzero(_select(filter_, dag))
                a, b = _ends(found, index, position)
                first.append(a)
                last.append(b)
                keys += [_key(found, int(m)) for m in np.unique(found.of[index]).tolist() if m >= 0]
            ends.append((np.concatenate(first), np.concatenate(last)))
            if len(group) > 1:
                overlaps.append(tuple(dict.fromkeys(keys)))
        total = sum(len(a[1]) * len(b[0]) for a, b in pairwise(ends))
        if total > _MAX_EDGES:
            raise DirectiveError(
                f"order joins {total} pairs of nodes", expected=f"at most {_MAX_EDGES}", hint="narrow the filters"
            )
        src = np.concatenate([np.repeat(a[1], len(b[0])) for a, b in pairwise(ends)])
        dst = np.concatenate([np.tile(b[0], len(a[1])) for a, b in pairwise(ends)])
        across = np.flatnonzero(dag.nodes.group[src] != dag.nodes.group[dst])
        if len(across):
            one, other = (_name(dag, int(side[across[0]])) for side in (src, dst))
            raise DirectiveError(
                f"order joins {one} and {other}, which lie on different rows",
                expected="one row: rows wait for each other through data alone",
            )
        back = (src == dst) | (
            (found.of[src] == found.of[dst]) & (found.of[src] >= 0) & (position[src] >= position[dst])
        )
        if back.any():
            node = int(src[np.flatnonzero(back)[0]])
            raise DirectiveError(
                f"cyclic order: {_name(dag, node)} is in two consecutive groups", expected="disjoint groups"
            )
        return OrderEdit(src.astype(np.int32), dst.astype(np.int32), tuple(overlaps), ())

    def _check_actions(self, dag: Dag) -> OrderEdit:
        found = _separate(dag)
        find = found.find()
        order = rows(dag)
        group_of, phase_of, stage_of = found.group.tolist(), found.phase.tolist(), found.stage.tolist()
        src: list[int] = []
        dst: list[int] = []
        overlaps: list[tuple[Key, ...]] = []
        of_group: dict[int, list[int]] = {}
        for m, group in enumerate(group_of):
            of_group.setdefault(group, []).append(m)
        keys = list(zip(stage_of, phase_of, found.microbatch.tolist(), strict=True))
        first, last = found.first.tolist(), found.last.tolist()
        for row, slots in self.actions:
            if row >= len(order):
                raise DirectiveError(f"row {row} does not exist", expected=f"rows 0-{len(order) - 1}")
            seen: dict[int, int] = {}
            previous: list[int] = []
            for position, slot in enumerate(slots):
                units: list[int] = []
                for action in slot:
                    key = (action.stage, int(PHASE_OF_KIND[action.kind]), action.microbatch if dag.microbatches else -1)
                    unit = find.get((key[0], key[1], -1 if key[2] is None else key[2]))
                    if unit is None or group_of[unit] != order[row]:
                        raise DirectiveError(f"row {row} names {action}, which {_absent(found, action, order, dag)}")
                    if unit in seen:
                        raise DirectiveError(f"row {row} names {action} twice", expected="each action once")
                    seen[unit] = position
                    units.append(unit)
                src += [last[a] for a in previous for _ in units]
                dst += [first[b] for _ in previous for b in units]
                if len(units) > 1:
                    overlaps.append(tuple(keys[unit] for unit in units))
                previous = units
            named = {stage_of[unit] for unit in seen if phase_of[unit] == _R}
            for unit in of_group.get(order[row], ()):
                if unit not in seen and (phase_of[unit] != _R or stage_of[unit] in named):
                    raise DirectiveError(
                        f"row {row} misses {_text(found, unit)}",
                        hint=f"a row in actions names all of its "
                        f"{len(of_group[order[row]])} actions; use filters for a partial order",
                    )
            self._data_order(found, keys, find, seen, row)
        return OrderEdit(
            np.asarray(src, np.int32),
            np.asarray(dst, np.int32),
            tuple(overlaps),
            tuple(order[row] for row, _ in self.actions),
        )

    @staticmethod
    def _data_order(found: Macros, keys: list[Key], find: dict[Key, int], seen: dict[int, int], row: int) -> None:
        """Refuse a row that puts a backward before what it needs of the same stage and microbatch."""
        for unit, position in seen.items():
            stage, phase, microbatch = keys[unit]
            for before in _NEEDS[phase]:
                other = find.get((stage, before, microbatch))
                if other is not None and seen.get(other, -1) >= position:
                    what = f"cyclic order: row {row} puts {_text(found, unit)} before {_text(found, other)}"
                    raise DirectiveError(what, expected=f"{_text(found, other)} first")

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[OrderEdit]) -> Dag:
        if not edits:
            return dag
        total: list[int] = [group for edit in edits for group in edit.total]
        if len(set(total)) < len(total):
            row = rows(dag).index(next(group for group in total if total.count(group) > 1))
            raise DirectiveError(f"two order directives claim row {row}", expected="one actions entry a row")
        fresh = [Edges.make(edit.src, edit.dst, Role.TEMPORAL) for edit in edits]
        overlaps = tuple(dict.fromkeys((*dag.overlaps, *(group for edit in edits for group in edit.overlaps))))
        ordered = (*dag.ordered, *total)
        out = replace(dag, edges=Edges.concat([dag.edges, *fresh]), overlaps=overlaps, ordered=ordered)
        _acyclic(out, across=any(not edit.total for edit in edits))
        return out

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        fields = {
            "filters": "two or more groups of filters, later ones not needed by earlier ones",
            "actions": "each compute action of a row once, F before B or BI before BW",
        }

        def draw(rng: Random) -> Order:
            if (dag.nodes.group[dag.compute] < 0).any():
                raise DirectiveError("nothing to order: not all compute is placed")
            found = _separate(dag)
            keys = sorted(_key(found, m) for m in range(len(found)) if found.phase[m] != Phase.R)
            made: Order | None = None
            if rng.random() < 0.5:
                row = rng.randrange(len(rows(dag)))
                made = serial_row(dag, row)
            for _ in range(50):
                if made is not None and made.legal(dag, mesh):
                    return made
                (s, p, m), (t, q, k) = rng.choice(keys), rng.choice(keys)
                made = cls(filters=((_filter(dag, s, p, m),), (_filter(dag, t, q, k),)))
            raise DirectiveError("no order directive is legal here")

        return Domain(fields, draw, dag, mesh)

    def legal(self, dag: Dag, mesh: Mesh | None = None) -> bool:
        """Return whether it applies without making the order cyclic."""
        try:
            _acyclic(self.apply(dag, mesh))
        except DirectiveError:
            return False
        return True

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Order]:
        """Swap two consecutive slots of a row; move a BW one to eight slots later."""
        for r, (row, slots) in enumerate(self.actions):
            for i in range(len(slots) - 1):
                jumps = (1, 2, 4, 8) if slots[i][0].kind.value == "BW" else (1,)
                for jump in jumps:
                    if i + jump >= len(slots):
                        break
                    moved = (*slots[:i], *slots[i + 1 : i + 1 + jump], slots[i], *slots[i + 1 + jump :])
                    near = Order(actions=(*self.actions[:r], (row, moved), *self.actions[r + 1 :]))
                    if near.legal(dag, mesh):
                        yield near


def serial_row(dag: Dag, row: int) -> Order:
    """Return a legal total order of one row: every forward, then every backward, BI before its BW."""
    found = _separate(dag)
    group = rows(dag)[row]
    units = [m for m in range(len(found)) if found.group[m] == group and found.phase[m] != Phase.R]
    late = {int(Phase.F): 0, int(Phase.B): 1, int(Phase.BI): 1, int(Phase.BW): 2}

    def rank(unit: int) -> tuple[int, int, int]:
        stage, phase, microbatch = _key(found, unit)
        return late[phase], microbatch, -stage if phase else stage

    actions = tuple((_action(found, unit),) for unit in sorted(units, key=rank))
    return Order(actions=((row, actions),))


def _select(filter_: Filter, dag: Dag) -> Mask:
    """Return the mask of a filter, saying so where it names B of a chunk that is split into BI and BW."""
    mask = filter_.mask(dag)
    if filter_.phases == ("B",) and not mask.any() and (dag.compute & (dag.nodes.phase == Phase.BI)).any():
        split = Filter((*filter_.without("PASS").items, ("PASS", "BI")))
        if split.mask(dag).any():
            raise DirectiveError(
                f"filter {filter_} names B of a chunk that is also split into BI and BW",
                expected="B, or BI and BW, never both",
            )
    return filter_.select(dag)


_F, _BI, _R = int(Phase.F), int(Phase.BI), int(Phase.R)
_NEEDS: dict[int, tuple[int, ...]] = {
    _F: (), int(Phase.B): (_F, _R), _BI: (_F, _R), int(Phase.BW): (_BI,), _R: (_F,)
}  # fmt: skip
"""What must come before a phase on its row; numbers, since members of enums are slow to look up in a loop."""
_CACHE: list[tuple[Dag, Macros]] = []


def _separate(dag: Dag) -> Macros:
    """Return the macros with every R apart, remembered for the DAG that was asked for last."""
    if not _CACHE or _CACHE[0][0] is not dag:
        _CACHE[:] = [(dag, macros(dag, np.ones(dag.stages + 1, np.bool_)))]
    return _CACHE[0][1]


def _read_actions(data: object) -> tuple[tuple[int, tuple[Slot, ...]], ...]:
    if not isinstance(data, Mapping) or not data:
        raise DirectiveError(
            "actions is not a mapping", expected='row -> text such as {"0": "0F0 0B0"}', found=repr(data)[:60]
        )
    read: list[tuple[int, tuple[Slot, ...]]] = []
    for row, text in data.items():
        number = int(row) if str(row).isdecimal() and len(str(row)) < 8 else -1
        if number < 0 or isinstance(row, bool):
            raise DirectiveError(f"actions row {row!r} is not a row number"[:90], expected="0, 1, ...")
        if not isinstance(text, str):
            raise DirectiveError(
                f"actions of row {number} is not a text", expected='such as "0F0 0F1 0B0 0B1"', found=repr(text)[:40]
            )
        slots = parse_slots(text)
        for slot in slots:
            for action in slot:
                if (
                    action.kind not in COMPUTE_KINDS
                    or action.microbatch is None
                    or action.region
                    or action.bucket is not None
                ):
                    raise DirectiveError(
                        f"row {number} names {action}", expected="compute such as 0F0, 0B1, 0BI2, 0BW2, 0R1"
                    )
        if not slots:
            raise DirectiveError(f"actions of row {number} is empty", expected="at least one action")
        read.append((number, slots))
    if len({row for row, _ in read}) < len(read):
        raise DirectiveError("actions names a row twice")
    return tuple(read)


def _ends(found: Macros, index: Any, position: Ints) -> tuple[Ints, Ints]:
    """Return the first and last of the selected nodes in each macro; communication nodes stand for themselves."""
    unit = np.where(found.of[index] >= 0, found.of[index], len(found) + index)
    order = np.lexsort((position[index], unit))
    change = np.flatnonzero(np.diff(unit[order], prepend=-1))
    after = np.append(change[1:], len(order)) - 1
    return index[order][change].astype(np.int32), index[order][after].astype(np.int32)


_ROUNDS = 3


def _acyclic(dag: Dag, *, across: bool = True) -> None:
    """Refuse temporal edges that close a cycle, on one row or (``across``) through messages between rows.

    Rows whose total orders wait for each other are left to the verifier, which shows the grid.

    Raises:
        DirectiveError: with the actions on one cycle.
    """
    found = macros(dag)
    unit, alone = found.of.copy(), found.of < 0
    unit[alone] = len(found) + np.arange(int(alone.sum()))
    src, dst = project(dag, unit, None if across else dag.edges.take(dag.edges.role != Role.MESSAGE))
    count = len(found) + int(alone.sum())
    for _ in range(_ROUNDS):  # what starts or ends nowhere is on no cycle, and most of it is gone at once
        starts, ends = np.bincount(dst, minlength=count) > 0, np.bincount(src, minlength=count) > 0
        keep = starts[src] & ends[dst]
        src, dst = src[keep], dst[keep]
    _, stuck = topological(count, src, dst)
    if stuck:
        path = [u for u in cycle(stuck, src, dst) if u < len(found)]
        order = rows(dag)
        names = [f"{_text(found, u)} (row {order.index(int(found.group[u]))})" for u in path]
        shown = [*names[:6], *(["..."] if len(names) > 6 else []), names[0]]
        raise DirectiveError("cyclic order: " + " -> ".join(shown), hint="each waits for the one before it")


def _key(found: Macros, unit: int) -> Key:
    return int(found.stage[unit]), int(found.phase[unit]), int(found.microbatch[unit])


def _action(found: Macros, unit: int) -> Action:
    stage, phase, microbatch = _key(found, unit)
    return Action(max(stage, 0), KIND_OF_PHASE[Phase(phase)], max(microbatch, 0))


def _text(found: Macros, unit: int) -> str:
    return str(_action(found, unit))


def _name(dag: Dag, node: int) -> str:
    nodes = dag.nodes
    return f"{nodes.stage[node]}{Phase(int(nodes.phase[node])).name}{nodes.microbatch[node]}"


def _filter(dag: Dag, stage: int, phase: int, microbatch: int) -> Filter:
    items: list[tuple[str, Any]] = [("PP", stage)] if stage >= 0 else []
    items += [(dag.split_name, microbatch)] if microbatch >= 0 else []
    return Filter((*items, ("PASS", Phase(phase).name)))


def _absent(found: Macros, action: Action, order: tuple[int, ...], dag: Dag) -> str:
    """Say why an action is not on a row."""
    find = found.find()
    microbatch = action.microbatch if dag.microbatches else -1
    unit = find.get((action.stage, int(PHASE_OF_KIND[action.kind]), -1 if microbatch is None else microbatch))
    if unit is not None:
        return f"is on row {order.index(int(found.group[unit]))}"
    if action.stage >= max(1, dag.stages):
        return f"does not exist: stages are 0-{max(0, dag.stages - 1)}"
    if action.microbatch is not None and action.microbatch >= max(1, dag.microbatches):
        return f"does not exist: microbatches are 0-{max(0, dag.microbatches - 1)}"
    other = {"B": Phase.BI, "BI": Phase.B, "BW": Phase.B, "R": Phase.R}.get(action.kind.value)
    if action.kind.value == "B" and other is not None and (action.stage, int(other), microbatch) in find:
        return "is also split into BI and BW: a chunk has B, or BI and BW, never both"
    return "does not exist" + (": no recompute directive covers it" if action.kind.value == "R" else "")
