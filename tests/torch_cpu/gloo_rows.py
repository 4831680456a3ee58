"""Processes that run the messages of plans for real: one a row, a thread a stream, blocking sends and receives."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

from piper_core.ir.action import ActionKind
from piper_core.schedule.plan import KINDS, Channel, Plan
from piper_core.schedule.plan_text import parse_plan

ROWS = 4
SENDS = {ActionKind.SEND_F: 0, ActionKind.SEND_B: 1}
RECVS = {ActionKind.RECV_F: 0, ActionKind.RECV_B: 1}


def verdicts(texts: Sequence[str], folder: Path, *, quiet_s: float, batch: int) -> list[str]:
    """Run plans (their text) on gloo processes; return ``ok``, ``mispaired`` or ``deadlock`` of each.

    Several run at once, on tags of their own; what makes no progress anywhere for ``quiet_s`` is a deadlock.
    """
    found: list[str] = []
    with _processes(texts, folder) as (pipes, left, wrong):
        for first in range(0, len(texts), batch):
            indices = range(first, min(first + batch, len(texts)))
            for pipe in pipes:
                pipe.send(list(indices))
            _until_quiet(left, indices, quiet_s)
            for i in indices:
                stuck = any(left[i * ROWS : (i + 1) * ROWS])
                found.append("mispaired" if any(wrong[i * ROWS : (i + 1) * ROWS]) else "deadlock" if stuck else "ok")
    return found


@contextmanager
def _processes(texts: Sequence[str], folder: Path) -> Iterator[tuple[list[Any], Any, Any]]:
    spawn = multiprocessing.get_context("spawn")
    left, wrong = spawn.Array("i", [1] * ROWS * len(texts)), spawn.Array("i", ROWS * len(texts))
    ends = [spawn.Pipe() for _ in range(ROWS)]
    store = str(folder / "store")
    made = [
        spawn.Process(target=_row, args=(row, store, list(texts), end[1], left, wrong), daemon=True)
        for row, end in enumerate(ends)
    ]
    try:
        for process in made:
            process.start()
        for near, _ in ends:
            if not near.poll(120) or near.recv() != "ready":
                raise TimeoutError("a gloo process did not start")
        yield [near for near, _ in ends], left, wrong
    finally:
        for process in made:
            process.kill()
        for process in made:
            process.join()
            process.close()
        for near, far in ends:
            near.close()
            far.close()


def _until_quiet(left: Any, indices: range, quiet_s: float) -> None:
    """Return when all actions of some plans have ended, or when none has for a while."""
    before, since = -1, time.monotonic()
    while True:
        now = sum(left[indices.start * ROWS : indices.stop * ROWS])
        if now != before:
            before, since = now, time.monotonic()
        if now == 0 or time.monotonic() - since > quiet_s:
            return
        time.sleep(0.02)


def _row(row: int, store: str, texts: list[str], pipe: Any, left: Any, wrong: Any) -> None:
    """Be one row: start the streams of the plans that the parent names, until it ends this process."""
    import torch.distributed

    plans = [parse_plan(text) for text in texts]
    for i, plan in enumerate(plans):
        left[i * ROWS + row] = sum(plan.streams[s].row == row for s in plan.stream_of().tolist())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=row, world_size=ROWS, timeout=timedelta(hours=1)
    )
    pipe.send("ready")
    while True:
        for i in pipe.recv():
            _start(plans[i], i, row, left, wrong)


def _start(plan: Plan, index: int, row: int, left: Any, wrong: Any) -> None:
    ended = [Event() for _ in range(len(plan))]
    bounds = plan.start.tolist()
    waits = [plan.waits[a:b].tolist() for a, b in pairwise(plan.wait_start.tolist())]

    def run(stream: int) -> None:
        for i in range(bounds[stream], bounds[stream + 1]):
            for w in waits[i]:
                ended[w].wait()
            if not _message(plan, i, index):
                wrong[index * ROWS + row] = 1
            ended[i].set()
            with left.get_lock():
                left[index * ROWS + row] -= 1

    for s, stream in enumerate(plan.streams):
        if stream.row == row:
            Thread(target=run, args=(s,), daemon=True).start()


def _message(plan: Plan, i: int, index: int) -> bool:
    """Send or receive for real, a send until its receiver says that it has it; return whether the content is right."""
    import torch
    import torch.distributed as dist

    kind, line = KINDS[int(plan.kind[i])], plan.lines[int(plan.line[i])] if plan.line[i] >= 0 else None
    if not isinstance(line, Channel):
        return True
    tag = index * 10_000 + int(plan.line[i]) * 2
    stage, microbatch = int(plan.stage[i]), int(plan.microbatch[i])
    taken = torch.zeros(1, dtype=torch.int64)
    if kind in SENDS:
        dist.send(torch.tensor([stage, microbatch, SENDS[kind]]), line.destination, tag=tag)
        dist.recv(taken, line.destination, tag=tag + 1)
        return True
    content = torch.zeros(3, dtype=torch.int64)
    dist.recv(content, line.source, tag=tag)
    dist.send(taken, line.source, tag=tag + 1)
    source, which, way = content.tolist()
    near = plan.inputs[stage] if way == 0 else [t for t, into in enumerate(plan.inputs) if stage in into]
    return way == RECVS[kind] and which == microbatch and source in near
