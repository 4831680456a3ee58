"""What cannot run is refused, for its own reason, in one line, with the place to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from piper_core.arch.synthetic import synthetic
from piper_core.errors import DirectiveError, PlanError
from piper_core.ir.action import ActionKind, format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import NodeKind
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import rows_of_stage
from piper_core.schedule.lower import ChannelRule
from piper_core.schedule.plan import KINDS, Plan, Stream, StreamKind, expand
from piper_core.schedule.verify import verify
from tests.null.laws.corrupt import Item, pack, unpack
from tests.null.laws.interpreter import fault

Streams = list[tuple[Stream, list[Item]]]
SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}
PLACE = [{"op": "place", "filter": {"PP": s}, "devices": [2 * s, 2 * s + 1]} for s in range(2)]
ZERO_3 = {"op": "replicate", "filter": {}, "devices": [[0, 1], [2, 3]], "shard_grads": True, "shard_params": True}
EVERY = {"0": "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1": "1F0 1B0 1F1 1BI1 1BW1 1F2 1B2 1F3 1B3"}


def dense(layers: int = 4, stages: int | None = 2) -> Dag:
    return training_dag(synthetic(f"dense:{layers}", stages))


def order(rows: dict[str, str]) -> dict[str, Any]:
    return {"op": "order", "actions": rows}


def refused(program: list[dict[str, Any]], dag: Dag | None = None) -> DirectiveError | PlanError:
    """Return the error of a program that must not compile."""
    with pytest.raises((DirectiveError, PlanError)) as caught:
        compile_program(Program.parse(program), dag or dense())
    return caught.value


def check_text(error: Exception) -> None:
    assert len(str(error).splitlines()) == 1
    if isinstance(error, PlanError):
        lines = error.context.splitlines()
        assert 1 <= len(lines) <= 10
        assert all(line.endswith("<-- here") for line in lines)
        assert str(error).startswith(f"{error.reason}: ")


# --- programs ---


def test_rows_that_wait_for_each_other() -> None:
    """Row 0 keeps 0F2 until 0B0 is done; row 1 wants 1F2 before 1B0."""
    error = refused(
        [SPLIT, *PLACE, order({"0": "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1": "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"})]
    )
    check_text(error)
    assert isinstance(error, PlanError)
    assert error.reason == "deadlock"
    assert "rows 0 and 1 wait for each other" in str(error)
    assert {"row 0", "row 1"} == {line[:5] for line in error.context.splitlines()}


def test_partial_orders_that_wait_for_each_other() -> None:
    """Named as a cycle, with the actions of both rows."""
    first = [[{"PP": 0, "MB": 0, "PASS": "B"}], [{"PP": 0, "MB": 1, "PASS": "F"}]]
    second = [[{"PP": 1, "MB": 1, "PASS": "F"}], [{"PP": 1, "MB": 0, "PASS": "B"}]]
    error = refused([SPLIT, *PLACE, {"op": "order", "filters": first}, {"op": "order", "filters": second}])
    check_text(error)
    assert "cyclic order: " in str(error)
    for name in ("0B0 (row 0)", "0F1 (row 0)", "1F1 (row 1)", "1B0 (row 1)"):
        assert name in str(error)


@pytest.mark.parametrize(("row", "text"), [
    ("0", "0B0 0F0 0F1 0F2 0B1 0F3 0B2 0B3"), ("1", "1F0 1B0 1F1 1BW1 1BI1 1F2 1B2 1F3 1B3"),
])  # fmt: skip
def test_a_row_against_its_own_data(row: str, text: str) -> None:
    error = refused([SPLIT, *PLACE, order(EVERY | {row: text})])
    check_text(error)
    assert f"cyclic order: row {row} puts " in str(error)


def test_a_row_against_the_data_of_its_stages() -> None:
    """Two stages on one row: 1F0 takes what 0F0 makes."""
    place = [{"op": "place", "filter": {}, "devices": [0]}]
    error = refused([*place, order({"0": "1F0 0F0 1B0 0B0"})])
    check_text(error)
    assert "cyclic order: " in str(error)
    assert "1F0 (row 0)" in str(error)


@pytest.mark.parametrize("rule", [ChannelRule.PAIR, ChannelRule.RANK])
@pytest.mark.parametrize("p", [3, 4])
@pytest.mark.parametrize("family", ["dualpipev", "zbv"])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_coarse_channels(family: str, p: int, rule: ChannelRule, more: int) -> None:
    """With one channel a pair of rows messages meet the wrong receive; with one stream a row, rows wait in a ring."""
    chosen, m = get_family(family), 2 * p + more
    homes = rows_of_stage(chosen.layout, p, 2)
    grid = chosen.grid(p, m, 2)
    program = Program.parse([
        SPLIT | {"num_microbatches": m},
        *({"op": "place", "filter": {"PP": s}, "devices": [row]} for s, (row,) in enumerate(homes)),
        order({str(r): format_slots(row) for r, row in enumerate(grid.rows)}),
    ])  # fmt: skip
    dag = dense(2 * p, 2 * p)
    assert fault(compile_program(program, dag).plan) is None
    with pytest.raises(PlanError) as caught:
        compile_program(program, dag, channels=rule)
    check_text(caught.value)
    assert caught.value.reason == ("mispaired" if rule is ChannelRule.PAIR else "deadlock")


REFUSED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "overlapping places": (
        "overlapping groups: [0, 1] and [1, 2] share rank 1",
        [PLACE[0], PLACE[1] | {"devices": [1, 2]}],
    ),
    "unequal places": ("unequal groups: [0, 1] and [2]", [PLACE[0], PLACE[1] | {"devices": [2]}]),
    "overlapping replicas": (
        "overlapping groups: rank 1 is named twice",
        [*PLACE, ZERO_3 | {"devices": [[0, 1], [1, 2]]}],
    ),
    "unequal replicas": ("unequal groups", [*PLACE, ZERO_3 | {"devices": [[0, 1], [2]]}]),
    "overlapping shards": (
        "overlapping groups: rank 2 is named twice",
        [*PLACE, {"op": "shard", "filter": {}, "kind": "tensor", "devices": [[0, 2], [2, 3]]}],
    ),
    "unequal shards": (
        "unequal groups",
        [*PLACE, {"op": "shard", "filter": {}, "kind": "tensor", "devices": [[0], [2, 3]]}],
    ),
    "a row that misses": ("row 0 misses 0B3", [SPLIT, *PLACE, order(EVERY | {"0": "0F0 0F1 0B0 0F2 0B1 0F3 0B2"})]),
    "a row that doubles": (
        "row 0 names 0F1 twice",
        [SPLIT, *PLACE, order(EVERY | {"0": "0F0 0F1 0F1 0B0 0F2 0B1 0F3 0B2 0B3"})],
    ),
    "another row's action": ("row 0 names 1F0, which is on row 1", [SPLIT, *PLACE, order(EVERY | {"0": "1F0 0F0"})]),
    "a filter of nothing": ("filter {PP: 7} matches nothing", [PLACE[0] | {"filter": {"PP": 7}}]),
    "a filter of no tag": ("unknown tag 'STAGE'", [PLACE[0] | {"filter": {"STAGE": 0}}]),
    "an order of nothing": (
        "matches nothing",
        [
            SPLIT,
            *PLACE,
            {"op": "order", "filters": [[{"PP": 0, "MB": 9, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "B"}]]},
        ],
    ),
    "B and halves of one chunk": (
        "which is also split into BI and BW: a chunk has B, or BI and BW, never both",
        [SPLIT, *PLACE, order(EVERY | {"0": "0F0 0B0 0BI0 0BW0 0F1 0B1 0F2 0B2 0F3 0B3"})],
    ),
    "B and halves in filters": (
        "names B of a chunk that is also split into BI and BW",
        [
            SPLIT,
            *PLACE,
            {
                "op": "order",
                "filters": [
                    [{"PP": 0, "MB": 0, "PASS": "BI"}],
                    [{"PP": 0, "MB": 0, "PASS": "BW"}],
                    [{"PP": 0, "MB": 0, "PASS": "B"}],
                ],
            },
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_programs(name: str) -> None:
    what, program = REFUSED[name]
    error = refused(program)
    check_text(error)
    assert isinstance(error, DirectiveError)
    assert what in str(error)
    assert error.where


def test_no_layer_is_dropped() -> None:
    """30 layers on 4 stages are 30 layers, uneven, never 28."""
    dag = dense(30, None)
    staged = Program.parse([{"op": "stage", "stages": 4}]).apply(dag)
    forward = (staged.nodes.kind == NodeKind.COMPUTE) & (staged.nodes.phase == 0)
    layers = {(int(staged.nodes.stage[n]), staged.chunks[staged.nodes.chunk[n]].layer) for n in forward.nonzero()[0]}
    inside = [(stage, layer) for stage, layer in layers if 0 <= layer < 30]
    assert sorted(layer for _, layer in inside) == list(range(30))
    assert sorted({sum(s == stage for s, _ in inside) for stage in range(4)}) in ([7, 8], [6, 8], [7, 9], [6, 7, 8])
    assert {(0, -1), (3, 30)} <= layers
    error = refused([{"op": "stage", "layers_per_stage": [7, 7, 7, 7]}], dag)
    check_text(error)
    assert "layers_per_stage adds up to 28 of 30 layers" in str(error)


# --- plans ---


@cache
def plan() -> Plan:
    """Two rows of two ranks, ZeRO-3, with a backward in halves on row 1."""
    return compile_program(Program.parse([SPLIT, *PLACE, ZERO_3, order(EVERY)]), dense()).plan


def find(streams: Streams, text: str, row: int | None = None) -> tuple[list[Item], int]:
    """Return the stream that has an action such as ``0F1`` (on a row), and its place there."""
    for stream, items in streams:
        for i, item in enumerate(items):
            kind, stage, microbatch, bucket = item.columns[:4]
            name = f"{stage}{KINDS[kind]}{microbatch if microbatch >= 0 else ''}{f'#{bucket}' if bucket >= 0 else ''}"
            if name == text and row in (None, stream.row):
                return items, i
    raise LookupError(text)


def take(streams: Streams, text: str, row: int | None = None) -> Item:
    items, i = find(streams, text, row)
    return items.pop(i)


def shift(streams: Streams, text: str, by: int, row: int | None = None) -> None:
    items, i = find(streams, text, row)
    items.insert(i + by, items.pop(i))


def again(streams: Streams, text: str) -> None:
    items, i = find(streams, text)
    items.insert(i + 1, Item(list(items[i].columns), list(items[i].waits)))


def whole_too(streams: Streams) -> None:
    """Run 1B1 as well as 1BI1 and 1BW1."""
    items, i = find(streams, "1BW1")
    kind = KINDS.index(ActionKind.B)
    items.insert(i + 1, Item([kind, *items[i].columns[1:]], []))


def forget(streams: Streams, text: str) -> None:
    items, i = find(streams, text)
    items[i].waits.clear()


HARMED: dict[str, tuple[str, str, Callable[[Streams], object]]] = {
    "a missing forward": ("incomplete", "0F1 is missing", lambda s: take(s, "0F1")),
    "a missing backward": ("incomplete", "0B2 is missing", lambda s: take(s, "0B2")),
    "half a backward": ("incomplete", "1BW1 is missing", lambda s: take(s, "1BW1")),
    "a missing update": ("incomplete", "1UPDATE is missing on row 1", lambda s: take(s, "1UPDATE")),
    "a missing norm": ("incomplete", "NORM is missing on row 0", lambda s: (take(s, "0NORM", 0), take(s, "0NORM", 1))),
    "a missing reduction": (
        "incomplete",
        "row 0 does not reduce the gradients of bucket 0 of microbatch 2",
        lambda s: take(s, "0REDUCE_SCATTER2#0"),
    ),
    "a forward twice": ("duplicate", "0F1 runs more than once", lambda s: again(s, "0F1")),
    "a reduction twice": (
        "duplicate",
        "0REDUCE_SCATTER2#0 on row 0 runs more than once",
        lambda s: again(s, "0REDUCE_SCATTER2#0"),
    ),
    "B and its halves": ("duplicate", "stage 1 microbatch 1 has both B and BI", whole_too),
    "a send without a receive": (
        "mispaired",
        "0SEND_F3 on row 0 has no partner on row 1",
        lambda s: take(s, "1RECV_F3"),
    ),
    "a receive without a send": (
        "mispaired",
        "1RECV_F3 on row 1 has no partner on row 0",
        lambda s: take(s, "0SEND_F3"),
    ),
    "messages that cross": (
        "mispaired",
        "row 1 expects 1RECV_F1 but the next message from row 0 is 0SEND_F2",
        lambda s: shift(s, "0SEND_F1", 1),
    ),
    "no message": (
        "data_dependency",
        "0B1 on row 0 has 0 messages to read from, of 1",
        lambda s: (take(s, "0RECV_B1"), take(s, "1SEND_B1")),
    ),
    "a missing wait for a message": (
        "data_dependency",
        "1F2 on row 1 does not wait for 1RECV_F2",
        lambda s: forget(s, "1F2"),
    ),
    "a missing wait of a send": (
        "data_dependency",
        "0SEND_F2 on row 0 does not wait for 0F2",
        lambda s: forget(s, "0SEND_F2"),
    ),
    "a missing wait of an update": ("data_dependency", "does not wait for", lambda s: forget(s, "1UPDATE")),
    "a missing wait of the norm": ("data_dependency", "0NORM on row 0 does not wait for", lambda s: forget(s, "0NORM")),
    "a backward first": ("data_dependency", "1B2 on row 1 does not wait for 1F2", lambda s: shift(s, "1B2", -2)),
    "no gather": (
        "data_dependency",
        "0F2 on row 0 reads bucket 0, which is not gathered for it",
        lambda s: (take(s, "0ALL_GATHER_F2#0"), take(s, "0FREE2#0")),
    ),
    "used after free": (
        "use_after_free",
        "0F2 on row 0 uses bucket 0 after it was freed",
        lambda s: shift(s, "0FREE2#0", -1),
    ),
    "freed twice": (
        "use_after_free",
        "more often than it gathers it",
        lambda s: (again(s, "0FREE2#0"), again(s, "0FREE2#0")),
    ),
    "never freed": (
        "leak",
        "row 0 gathers bucket 0 2 times for microbatch 2 and frees it 1 times",
        lambda s: take(s, "0FREE2#0"),
    ),
}


@pytest.mark.parametrize("name", HARMED)
def test_plans(name: str) -> None:
    reason, what, harm = HARMED[name]
    streams = [(stream, list(items)) for stream, items in unpack(plan())]
    harm(streams)
    bad = pack(plan(), streams)
    with pytest.raises(PlanError) as caught:
        verify(bad)
    check_text(caught.value)
    assert caught.value.reason == reason
    assert what in str(caught.value)
    assert fault(bad) is not None
    assert fault(plan()) is None


def test_members_that_disagree_in_order() -> None:
    """In a plan of processes, one member of a group gathers in another order than the other."""
    processes = expand(plan())
    verify(processes)
    streams = [(stream, list(items)) for stream, items in unpack(processes)]
    shift(streams, "0ALL_GATHER_F1#0", 1, row=1)
    with pytest.raises(PlanError) as caught:
        verify(pack(processes, streams))
    check_text(caught.value)
    assert caught.value.reason == "collective_order"
    assert "rows 0 and 1 meet in different collectives: 0ALL_GATHER_F1#0 and 0ALL_GATHER_B0#0" in str(caught.value)


def test_a_member_that_is_missing() -> None:
    processes = expand(plan())
    streams = [(stream, list(items)) for stream, items in unpack(processes)]
    take(streams, "0NORM", row=3)
    with pytest.raises(PlanError) as caught:
        verify(pack(processes, streams))
    check_text(caught.value)
    assert caught.value.reason in ("collective_order", "incomplete")


def test_compute_off_its_stream() -> None:
    harmed = replace(
        plan(), streams=tuple(replace(s, kind=StreamKind.COLLECTIVE) if s.row == 0 else s for s in plan().streams)
    )
    with pytest.raises(PlanError, match="is not on a compute stream") as caught:
        verify(harmed)
    check_text(caught.value)
    assert fault(harmed) is not None
