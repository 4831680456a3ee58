"""Plans with something wrong: small random edits of a plan's streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from piper_core.ir.action import ActionKind
from piper_core.schedule.plan import CODE, Plan, Stream, StreamKind, assemble

SENDS = (CODE[ActionKind.SEND_F], CODE[ActionKind.SEND_B])
FREE = CODE[ActionKind.FREE]
KIND, STAGE, MICROBATCH = range(3)


@dataclass(eq=False, slots=True)
class Item:
    """One action: (kind, stage, microbatch, bucket, label, line), and what it waits for."""

    columns: list[int]
    waits: list[Item]


def unpack(plan: Plan) -> list[tuple[Stream, list[Item]]]:
    """Return the streams of a plan as lists that can be edited."""
    columns = (plan.kind, plan.stage, plan.microbatch, plan.bucket, plan.label, plan.line)
    items = [Item(list(row), []) for row in zip(*(column.tolist() for column in columns), strict=True)]
    start, waits = plan.wait_start.tolist(), plan.waits.tolist()
    for i, item in enumerate(items):
        item.waits = [items[w] for w in waits[start[i] : start[i + 1]]]
    bounds = plan.start.tolist()
    return [(stream, items[bounds[s] : bounds[s + 1]]) for s, stream in enumerate(plan.streams)]


def pack(plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> Plan:
    """Return a plan with these streams and the tables of another; waits for what is gone, or is near, are dropped."""
    place = {id(item): (s, k) for s, (_, items) in enumerate(streams) for k, item in enumerate(items)}
    waits = [
        [[place[id(w)] for w in item.waits if id(w) in place and place[id(w)][0] != s] for item in items]
        for s, (_, items) in enumerate(streams)
    ]
    tables = (
        "rows",
        "microbatches",
        "inputs",
        "lines",
        "labels",
        "buckets",
        "repeated",
        "parts",
        "derived",
        "sync",
        "lanes",
    )
    base = {name: getattr(plan, name) for name in tables}
    rows = [[tuple(item.columns) for item in items] for _, items in streams]
    return assemble(base, [(stream, row) for (stream, _), row in zip(streams, rows, strict=True)], waits)


def _some(rng: Random, streams: list[tuple[Stream, list[Item]]], least: int = 1) -> list[Item]:
    """Return a stream's actions: half of the time those of a compute stream."""
    kinds = (StreamKind.COMPUTE,) if rng.random() < 0.5 else tuple(StreamKind)
    return rng.choice([items for stream, items in streams if len(items) >= least and stream.kind in kinds] or [[]])


def swap(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Swap two neighbours of a stream."""
    items = _some(rng, streams, 2)
    if len(items) > 1:
        i = rng.randrange(len(items) - 1)
        items[i], items[i + 1] = items[i + 1], items[i]


def drop(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Take an action out."""
    items = _some(rng, streams)
    if items:
        items.pop(rng.randrange(len(items)))


def double(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Run an action a second time, right after or anywhere later."""
    items = _some(rng, streams)
    if items:
        i = rng.randrange(len(items))
        items.insert(rng.randint(i + 1, len(items)), Item(list(items[i].columns), list(items[i].waits)))


def unwait(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Forget a wait."""
    waiting = [item for _, items in streams for item in items if item.waits]
    if waiting:
        item = rng.choice(waiting)
        item.waits.pop(rng.randrange(len(item.waits)))


def wait(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Wait for some action of another stream of the same row."""
    row = rng.randrange(len(plan.rows))
    items = [item for stream, items in streams if stream.row == row for item in items]
    if items:
        rng.choice(items).waits.append(rng.choice(items))


def move(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Put an action at another place of its stream."""
    items = _some(rng, streams, 2)
    if items:
        item = items.pop(rng.randrange(len(items)))
        items.insert(rng.randint(0, len(items)), item)


def renumber(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Change the microbatch of an action."""
    items = _some(rng, streams)
    if items:
        rng.choice(items).columns[MICROBATCH] = rng.randrange(plan.microbatches)


def swap_sends(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Swap two neighbouring sends, and half of the time what they meet as well."""
    sends = [items for _, items in streams if len(items) > 1 and items[0].columns[KIND] in SENDS]
    if sends:
        items = rng.choice(sends)
        i = rng.randrange(len(items) - 1)
        line = items[i].columns[-1]
        both = rng.random() < 0.5
        for _, queue in streams:
            if queue is items or (both and queue and queue[0].columns[-1] == line and len(queue) > i + 1):
                queue[i], queue[i + 1] = queue[i + 1], queue[i]


def free(rng: Random, plan: Plan, streams: list[tuple[Stream, list[Item]]]) -> None:
    """Free a bucket earlier or later, twice or never."""
    places = [(items, i) for _, items in streams for i, item in enumerate(items) if item.columns[KIND] == FREE]
    if places:
        items, i = rng.choice(places)
        item = items.pop(i)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            items.insert(max(0, min(len(items), i + rng.randint(-4, 4))), Item(list(item.columns), []))


EDITS: tuple[Callable[[Random, Plan, list[tuple[Stream, list[Item]]]], None], ...] = (
    swap, swap, swap, swap_sends, free,
    drop, double, unwait, unwait, unwait, wait, wait, wait, wait, move, move, renumber,
)  # fmt: skip


def corrupt(rng: Random, plan: Plan) -> Plan:
    """Return a plan with one or two random edits."""
    streams = [(stream, list(items)) for stream, items in unpack(plan)]
    for _ in range(rng.choice((1, 1, 1, 2))):
        rng.choice(EDITS)(rng, plan, streams)
    return pack(plan, streams)
