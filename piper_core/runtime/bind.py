"""From a row's steps to callables: every look-up that can be made once is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piper_core.errors import ConfigError
from piper_core.ir.action import COMPUTE_KINDS, ActionKind
from piper_core.runtime.communicator import Work
from piper_core.runtime.overlap import begins
from piper_core.runtime.steps import INNER, RECVS, SENDS, Do
from piper_core.runtime.tables import Meeting, Message, Named, Task
from piper_core.schedule.plan import KINDS, Channel
from piper_core.schedule.plan import Communicator as Line

if TYPE_CHECKING:
    from piper_core.runtime.program import RankProgram

Call = Callable[[], object]
Bound = tuple[int, Do, Call]


def bind(program: RankProgram) -> Iterator[Bound]:
    """Yield (action, what is done with it, the call) of every step that does something."""
    plan = program.plan
    finishes: dict[int, list[Callable[[], object]]] = {}
    last: list[Bound] = []
    for do, action in program.table.steps:
        kind = KINDS[int(plan.kind[action])]
        meeting = program.table.meetings.get(action)
        if meeting is not None and meeting.first and do is Do.START:
            yield from ((action, do, call) for call in _compute(program, action, program.table.tasks[action]))
        if do is Do.WAIT:
            if action in finishes:
                yield action, do, _Finish(finishes[action])
            if meeting is not None and not meeting.first:
                yield from ((action, do, call) for call in _compute(program, action, program.table.tasks[action]))
            continue
        if meeting is not None:
            start = _meet(meeting, program.values[int(plan.microbatch[action])])
            yield action, do, _Start(start, finishes.setdefault(action, []))
            continue
        if kind in INNER:
            continue
        if kind in COMPUTE_KINDS:
            yield from ((action, do, call) for call in _compute(program, action, program.table.tasks[action]))
        elif kind is ActionKind.UPDATE:
            call = _update(program, int(plan.stage[action]))
            if program.sync.copies and not program.lowering.has_norm:
                last.append((action, do, call))  # both copies of a parameter must have been reduced
            else:
                yield action, do, call
        elif kind is ActionKind.FREE:
            bucket = program.sync.buckets[int(plan.bucket[action])]
            yield action, do, _free(program, bucket, int(plan.microbatch[action]))
        else:
            start = _start(program, action, kind)
            yield action, do, _Start(start, finishes.setdefault(action, []))
    yield from last


class _Start:
    """Start something and keep what finishes it."""

    __slots__ = ("keep", "start")

    def __init__(self, start: Callable[[], Callable[[], object]], keep: list[Callable[[], object]]) -> None:
        self.start, self.keep = start, keep

    def __call__(self) -> None:
        self.keep.append(self.start())


class _Finish:
    """Finish what was started."""

    __slots__ = ("kept",)

    def __init__(self, kept: list[Callable[[], object]]) -> None:
        self.kept = kept

    def __call__(self) -> None:
        self.kept.pop()()


# --- compute ---


def _compute(program: RankProgram, action: int, task: Task) -> Iterator[Call]:
    """Yield what an action of compute does: gradient buffers of a microbatch first, then its graph."""
    plan, lowering, sync = program.plan, program.lowering, program.sync
    stage, microbatch = int(plan.stage[action]), int(plan.microbatch[action])
    kind = KINDS[int(plan.kind[action])]
    storage = sync.stages[stage]
    wanted = lowering.outputs(program.row, task.spec)
    names = {name: bucket for bucket in storage.buckets.values() for name in bucket.names()}
    each = {name for name, bucket in names.items() if bucket.each}
    gathered = {name for name, bucket in names.items() if bucket.zero == 3}
    constants = program.constants(stage)
    macro = lowering.macros.macro(task.spec, wanted, constants.keys() - gathered, each)
    if gathered & set(macro.varying) and kind is ActionKind.BW:
        raise ConfigError(
            f"{plan.action(action)} reads a parameter that ZeRO-3 gathers for F and BI alone; keep B whole "
            "or use ZeRO-2"
        )
    way = "F" if kind in (ActionKind.F, ActionKind.ALL_TO_ALL_F) else "B"
    keys = [f"{name}@{way}" if name in gathered else name for name in macro.varying]
    keys += [f"+{name}" for name in macro.adds_each]
    totals = {k: v for bucket in storage.buckets.values() for k, v in bucket.totals().items()}
    fixed = [*(totals[name] for name in macro.adds), *(constants[name] for name in macro.fixed)]
    for bucket in {id(b): b for name in macro.adds_each for b in (names[name],)}.values():
        yield _opened(program, bucket, microbatch)
    results = {lowering.loss: _keep_loss(program, microbatch)} if kind is ActionKind.F else {}
    if kind is ActionKind.F:
        results |= {name: _keep_counts(program, layer) for layer, name in lowering.counts.items()}
    stored = [name if name in task.kept else "" for name in macro.outputs]
    taken = [(i, results[name]) for i, name in enumerate(macro.outputs) if name in results and name in task.outputs]
    spent = tuple(name for name in task.spent if name in macro.varying)
    yield _run(macro.call, fixed, keys, spent, stored, taken, program.values[microbatch])


def _run(
    call: Callable[[list[Tensor]], Any], fixed: list[Tensor], keys: list[str], spent: tuple[str, ...],
    stored: list[str], taken: list[tuple[int, Callable[[Tensor], None]]], values: dict[str, Tensor],
) -> Call:  # fmt: skip
    """Return a call of a graph on a microbatch's values."""
    get = itemgetter(*keys) if len(keys) > 1 else None
    only = keys[0] if len(keys) == 1 else ""
    plain = all(stored) and not taken

    def run() -> None:
        arguments = [*fixed, *get(values)] if get is not None else [*fixed, values[only]] if only else [*fixed]
        for name in spent:
            del values[name]
        made = call(arguments)
        if plain:
            values.update(zip(stored, made, strict=True))
            return
        for name, value in zip(stored, made, strict=True):
            if name:
                values[name] = value
        for i, keep in taken:
            keep(made[i])

    return run


def _opened(program: RankProgram, bucket: Any, microbatch: int) -> Call:
    return lambda: program.sync.open(bucket, microbatch)


def _keep_loss(program: RankProgram, microbatch: int) -> Callable[[Tensor], None]:
    def keep(loss: Tensor) -> None:
        program.losses[microbatch] = loss

    return keep


def _keep_counts(program: RankProgram, layer: int) -> Callable[[Tensor], None]:
    return lambda counts: program.balance.add(layer, counts)


def _update(program: RankProgram, stage: int) -> Call:
    return lambda: program.sync.update(stage)


def _free(program: RankProgram, bucket: Any, microbatch: int) -> Call:
    return lambda: program.sync.free(bucket, microbatch)


# --- communication ---


def _start(program: RankProgram, action: int, kind: ActionKind) -> Callable[[], Callable[[], object]]:
    """Return what starts an action of communication; it returns what waits for it."""
    plan, sync, line = program.plan, program.sync, int(program.plan.line[action])
    microbatch = int(plan.microbatch[action])
    if kind in SENDS or kind in RECVS:
        channel = plan.lines[line]
        assert isinstance(channel, Channel)
        row = channel.destination if kind in SENDS else channel.source
        peer = plan.rows[row][program.lane]
        message = program.table.messages[action]
        make = _send if kind in SENDS else _receive
        return make(program, message, program.values[microbatch], peer, line)
    group = program.group_of_line(line)
    if kind is ActionKind.NORM:
        return lambda: sync.norm_start(group)
    bucket = sync.buckets[int(plan.bucket[action])]
    meets = plan.lines[line]
    assert isinstance(meets, Line)
    assert group is not None, "a plan has no collective of one rank but the norm"
    if meets.label == "tie":
        return lambda: sync.tie(bucket, group)
    match kind:
        case ActionKind.ALL_GATHER:
            return lambda: sync.gather_step(bucket, group)
        case ActionKind.ALL_GATHER_F:
            return lambda: sync.gather_each(bucket, group, microbatch, "F")
        case ActionKind.ALL_GATHER_B | ActionKind.ALL_GATHER_BI | ActionKind.ALL_GATHER_R:
            return lambda: sync.gather_each(bucket, group, microbatch, "B")
        case ActionKind.ALL_REDUCE | ActionKind.REDUCE_SCATTER if bucket.each:
            return lambda: sync.reduce_each(bucket, group, microbatch)
        case ActionKind.ALL_REDUCE | ActionKind.REDUCE_SCATTER:
            return lambda: sync.reduce_step(bucket, group)
        case _:
            raise AssertionError(f"{plan.action(action)} is no communication")


def _meet(meeting: Meeting, values: dict[str, Tensor]) -> Callable[[], Callable[[], object]]:
    """Return what begins a collective that stands apart."""
    begin = begins(meeting.target)

    def start() -> Callable[[], object]:
        arrived = begin(*(values[each.name] if isinstance(each, Named) else each for each in meeting.arguments))
        for name in meeting.spent:
            del values[name]

        def finish() -> None:
            values[meeting.result] = arrived()

        return finish

    return start


def _send(
    program: RankProgram, message: Message, values: dict[str, Tensor], peer: int, channel: int
) -> Callable[[], Callable[[], object]]:
    send = program.communicator.send

    def start() -> Callable[[], object]:
        given = [values[name].contiguous() for name in message.values]
        for name in message.spent:
            del values[name]
        works = [send(each, peer, channel) for each in given]
        return works[0].wait if len(works) == 1 else lambda: [work.wait() for work in works]

    return start


def _receive(
    program: RankProgram, message: Message, values: dict[str, Tensor], peer: int, channel: int
) -> Callable[[], Callable[[], object]]:
    receive = program.communicator.recv
    shapes = [(name, program.lowering.values[name]) for name in message.values]
    like = [(name, tuple(value.shape), value.dtype) for name, value in shapes]
    device = program.device

    def start() -> Callable[[], object]:
        works: list[tuple[str, Tensor, Work]] = []
        for name, shape, dtype in like:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            works.append((name, buffer, receive(buffer, peer, channel)))

        def finish() -> None:
            for name, buffer, work in works:
                work.wait()
                values[name] = buffer

        return finish

    return start
