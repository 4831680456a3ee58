"""Completeness of a plan: everything that the step needs is there, once, and on the right row."""

from __future__ import annotations

from typing import TypeVar

from piper_core.names import Sync
from piper_core.schedule.plan import KINDS, Part, Reduction
from piper_core.schedule.verify_table import (
    BI,
    BW,
    COMPUTE,
    FREE,
    GATHERS,
    INNER,
    NORM,
    RECVS,
    REDUCES,
    UPDATE,
    B,
    F,
    PlanTable,
    R,
    word,
)

K = TypeVar("K")


class _Cut:
    """A way to cut a macro: the labels of its compute pieces in order, those and the number of its inner ones."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.labels = [part.label for part in parts if not part.inner]
        self.inner = {part.label for part in parts if part.inner}
        self.count = sum(part.inner for part in parts)


def complete(table: PlanTable) -> None:
    """Check that each (stage, microbatch) has F once, one of B and {BI, BW}, and its R; macros whole; every reduction,
    update and norm once. Fills in the table's maps.

    Raises:
        PlanError: ``incomplete``, ``duplicate``; ``data_dependency`` where a backward is on another row than its F.
    """
    _find(table)
    fitting: dict[tuple[int, ...], list[_Cut]] = {}
    for key, found in table.at.items():
        _macro(table, key, found, fitting)
    for lane in sorted(set(table.plan.lanes) or {0}):
        for stage in range(table.plan.stages):
            for microbatch in range(table.plan.microbatches):
                _once(table, lane, stage, microbatch)
    _pieces(table)
    _end_of_step(table)


def _find(table: PlanTable) -> None:
    """Fill in the maps of the table."""
    columns = zip(table.kind, table.row, table.stage, table.microbatch, strict=True)
    for i, (kind, row, stage, microbatch) in enumerate(columns):
        if kind in INNER:
            _only(table, table.inner.setdefault((row, stage, microbatch), {}), table.label[i], i)
            continue
        if (kind in COMPUTE or kind in (FREE, UPDATE)) and not table.on_compute(i):
            raise table.error("incomplete", f"{table.name(i)} on row {row} is not on a compute stream", [i])
        if kind in COMPUTE:
            table.at.setdefault((table.lane[i], stage, kind, microbatch), []).append(i)
        elif kind in RECVS:
            table.recv.setdefault((row, RECVS[kind], stage, microbatch), []).append(i)
        elif kind in GATHERS:
            _only(table, table.gather, (row, GATHERS[kind], table.bucket[i], microbatch), i)
        elif kind in REDUCES:
            if not 0 <= table.bucket[i] < len(table.plan.buckets):
                raise table.error("incomplete", f"{table.name(i)} is of no bucket", [i])
            if table.is_tie(i):
                table.tie.setdefault((row, table.bucket[i]), []).append(i)
            else:
                _only(table, table.reduce, (row, table.bucket[i], microbatch), i)
        elif kind == UPDATE:
            _only(table, table.update, (row, stage), i)
        elif kind == NORM:
            _only(table, table.norm, row, i)


def _only(table: PlanTable, held: dict[K, int], key: K, i: int) -> None:
    if key in held:
        raise table.error("duplicate", f"{table.name(i)} on row {table.row[i]} runs more than once", [held[key], i])
    held[key] = i


def _macro(
    table: PlanTable, key: tuple[int, int, int, int], found: list[int], fitting: dict[tuple[int, ...], list[_Cut]]
) -> None:
    """Find the cut that the pieces of one macro follow: of those that fit, the one with most inner collectives.
    ``fitting`` keeps those that fit, by stage, kind and labels."""
    _, stage, kind, microbatch = key
    if not 0 <= stage < table.plan.stages or not 0 <= microbatch < table.plan.microbatches:
        raise table.error("incomplete", f"{table.name(found[0])} is of no stage or microbatch of the plan", found)
    labels = [table.label[i] for i in found]
    if labels == [-1]:
        return
    like = (stage, kind, *labels)
    if like not in fitting:
        cuts = map(_Cut, table.variants.get((stage, kind), ()))
        fitting[like] = sorted((cut for cut in cuts if cut.labels == labels), key=lambda cut: -cut.count)
    if not fitting[like]:
        twice = len(set(labels)) < len(labels)
        what = "runs more than once" if twice else "does not run all its parts in order"
        raise table.error("duplicate" if twice else "incomplete", f"{word(stage, kind, microbatch)} {what}", found)
    inner = table.inner.get((table.row[found[0]], stage, microbatch), {})
    whole = next((cut for cut in fitting[like] if cut.inner <= inner.keys()), None)
    if whole is None:
        missing = next(p.label for p in fitting[like][0].parts if p.inner and p.label not in inner)
        what = f"{word(stage, kind, microbatch)} lacks its collective {table.plan.labels[missing]}"
        raise table.error("incomplete", what, found)
    computes = iter(found)
    table.variant[key] = whole.parts
    table.members[key] = [inner[part.label] if part.inner else next(computes) for part in whole.parts]


def _once(table: PlanTable, lane: int, stage: int, microbatch: int) -> None:
    """Refuse a (stage, microbatch) without F, with other than one of B and {BI, BW}, on two rows, or without its R."""
    found = {
        k: table.at[lane, stage, k, microbatch] for k in (F, B, BI, BW, R) if (lane, stage, k, microbatch) in table.at
    }
    if F not in found:
        raise table.error("incomplete", f"{stage}F{microbatch} is missing", _near(table, lane, stage, microbatch))
    again = bool(table.plan.repeated) and microbatch in table.plan.repeated[stage]
    if again != (R in found):
        what = "is missing" if again else "is not needed: no recompute covers it"
        raise table.error("incomplete", f"{stage}R{microbatch} {what}", found[F] if again else found[R])
    has = [k for k in found if k not in (F, R)]
    if has not in ([B], [BI, BW]):
        if B in has:
            what = f"stage {stage} microbatch {microbatch} has both B and {KINDS[has[1]].value}"
            raise table.error("duplicate", what, found[has[1]])
        missing = "B" if not has else "BW" if has == [BI] else "BI"
        raise table.error("incomplete", f"{stage}{missing}{microbatch} is missing", found[F])
    for k in found:
        if table.row[found[k][0]] != table.row[found[F][0]]:
            what = f"{word(stage, k, microbatch)} is on another row than {stage}F{microbatch}"
            raise table.error("data_dependency", what, found[k])


def _near(table: PlanTable, lane: int, stage: int, microbatch: int) -> list[int]:
    """Return an action to show for a forward that is missing: of its microbatch, of its stage, or the last of row 0."""
    keys = [key for key in table.at if key[0] == lane and key[1] == stage] or list(table.at)
    keys = [key for key in keys if key[3] == microbatch] or keys
    return table.at[keys[-1]][-1:] if keys else table.last(0)


def _pieces(table: PlanTable) -> None:
    """Refuse an inner collective that no opened macro has, or that two of them share."""
    claimed: set[int] = set()
    for key, variant in table.variant.items():
        for part, i in zip(variant, table.members[key], strict=True):
            if part.inner and i in claimed:
                raise table.error("incomplete", f"{table.name(i)} on row {table.row[i]} serves two phases", [i])
            if part.inner:
                claimed.add(i)
    stray = [i for held in table.inner.values() for i in held.values() if i not in claimed]
    if stray:
        i = min(stray)
        raise table.error("incomplete", f"{table.name(i)} on row {table.row[i]} belongs to no action", [i])


def _end_of_step(table: PlanTable) -> None:
    """Each stage's gradients are reduced as its buckets say, updated once on each row, and counted in one norm."""
    held: dict[tuple[int, int], list[int]] = {}
    for (_, stage, kind, microbatch), found in table.at.items():
        if kind == F:
            held.setdefault((table.row[found[0]], stage), []).append(microbatch)
    for row, stage in held:
        if (row, stage) not in table.update:
            raise table.error("incomplete", f"{stage}UPDATE is missing on row {row}", table.last(row))
    stray = [i for key, i in table.update.items() if key not in held]
    if stray:
        raise table.error("incomplete", f"{table.name(stray[0])} is on a row that does not hold its stage", stray[:1])
    wanted: set[tuple[int, int, int]] = set()
    for b, use in enumerate(table.plan.buckets):
        for (row, stage), microbatches in held.items():
            if stage == use.stage and use.reduction is not Reduction.NONE:
                wanted.update((row, b, m) for m in (microbatches if use.reduction is Reduction.EACH else (-1,)))
    for row, b, microbatch in sorted(wanted - table.reduce.keys()):
        of = "" if microbatch < 0 else f" of microbatch {microbatch}"
        raise table.error("incomplete", f"row {row} does not reduce the gradients of bucket {b}{of}", table.last(row))
    for key in sorted(table.reduce.keys() - wanted):
        i = table.reduce[key]
        raise table.error("incomplete", f"{table.name(i)} on row {key[0]} reduces nothing", [i])
    if table.plan.sync is not Sync.NONE:
        for row in sorted({row for row, _ in held} - table.norm.keys()):
            raise table.error("incomplete", f"NORM is missing on row {row}", table.last(row))
