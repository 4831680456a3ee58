"""The list of steps of a row keeps what the plan says, and gives each value to whoever reads it."""

from __future__ import annotations

from collections.abc import Container

import pytest
import torch

from piper_core.ir.action import ActionKind
from piper_core.runtime.steps import INNER, Do, flatten
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from piper_core.schedule.plan import KINDS, Plan, StreamKind
from tests.torch_cpu.runtime.cases import LLAMA, MIXTURE, TIED, Case, compiled, lowering


def case(family: str) -> Case:
    layout = FAMILIES[family].layout
    v = 2 if layout is Layout.V or family == "interleaved_1f1b" else 1
    zero = 1 if layout is Layout.BIDIRECTIONAL else 3
    return Case(MIXTURE, family, pp=2, v=v, m=4, dp=2, ep=2, zero=zero, recompute="full")


CASES = [*map(case, FAMILIES), Case(TIED, pp=2, m=4, dp=2, zero=1), Case(TIED, pp=2, m=2, dp=2, zero=3)]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_steps_keep_order_and_waits(each: Case) -> None:
    plan = compiled(each).plan
    for row in range(len(plan.rows)):
        check_row(plan, row)


def check_row(plan: Plan, row: int, apart: Container[int] = frozenset()) -> None:
    stream_of = plan.stream_of().tolist()
    mine = {a for a in range(len(plan)) if plan.streams[stream_of[a]].row == row}
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    for at, (do, action) in enumerate(flatten(plan, row, apart)):
        if do is not Do.WAIT:
            assert action not in began
            began[action] = at
        if do is not Do.START:
            assert action not in ended
            ended[action] = at
    assert began.keys() == ended.keys() == mine
    inner = {a for a in mine if KINDS[int(plan.kind[a])] in INNER and a not in apart}
    for action in mine:
        before = plan.waits[plan.wait_start[action] : plan.wait_start[action + 1]].tolist()
        for w in before:  # what a graph does inside is over when it has begun
            assert (began[w] if w in inner else ended[w]) < began[action], (plan.action(w), plan.action(action))
    for s, stream in enumerate(plan.streams):
        if stream.row == row:
            places = [began[a] for a in range(int(plan.start[s]), int(plan.start[s + 1]))]
            assert places == sorted(places)


def test_exchanges_of_overlap_groups_run_beside_the_other_member() -> None:
    """Most exchanges have an action of compute between start and wait; not what starts when a message has come."""
    shared = lowering(Case(MIXTURE, "dualpipev", pp=2, v=2, m=6, dp=2, ep=2), torch.float64)
    for row in range(2):
        plan, table = shared.compiled.plan, shared.table(row)
        check_row(plan, row, table.meetings)
        place = {step: i for i, step in enumerate(table.steps)}
        beside = [
            any(do is Do.RUN for do, _ in table.steps[place[Do.START, a] : place[Do.WAIT, a]]) for a in table.meetings
        ]
        assert len(beside) > 20
        assert sum(beside) > 0.6 * len(beside)


def test_receives_start_before_the_compute_that_they_can_overlap() -> None:
    plan = compiled(Case(LLAMA, "1f1b", pp=2, m=6)).plan
    steps = list(flatten(plan, 0))
    (stream,) = (i for i, s in enumerate(plan.streams) if s.row == 0 and s.kind is StreamKind.RECV)
    second = int(plan.start[stream]) + 1
    compute = [a for do, a in steps if do is Do.RUN and KINDS[int(plan.kind[a])] is ActionKind.B]
    assert steps.index((Do.START, second)) < steps.index((Do.RUN, compute[0]))  # look_ahead 1
    assert steps.index((Do.WAIT, second)) > steps.index((Do.RUN, compute[0]))


def test_values_are_made_before_they_are_read_and_dropped_after() -> None:
    shared = lowering(Case(LLAMA, "zbv", pp=2, v=2, m=4), torch.float64)
    for row in range(2):
        table = shared.table(row)
        held: dict[int, set[str]] = {m: set(table.given) for m in range(4)}
        plan = shared.compiled.plan
        most = 0
        for do, action in table.steps:
            values = held.setdefault(int(plan.microbatch[action]), set())
            if action in table.tasks:
                task = table.tasks[action]
                reads = shared.macros.joined(task.spec, shared.outputs(row, task.spec)).inputs
                varying = {n.name for n in reads} - shared.constant_names
                assert varying <= values
                values -= set(task.spent)
                values |= task.kept
            elif action in table.messages:
                message = table.messages[action]
                if KINDS[int(plan.kind[action])] in (ActionKind.SEND_F, ActionKind.SEND_B):
                    if do is Do.START:
                        assert set(message.values) <= values
                        values -= set(message.spent)
                elif do is Do.WAIT:
                    values |= set(message.values)
            most = max(most, sum(map(len, held.values())))
        left = {name for values in held.values() for name in values}
        assert left <= set(table.given)
        assert most > len(table.given)
