"""What the list scheduler works on: tasks with rows, seconds, precedence and memory, and measures of an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from piper_core.errors import DirectiveError, InfeasibleError
from piper_core.ir.action import KIND_OF_PHASE, Action
from piper_core.names import Phase
from piper_core.schedule.grid import Grid, Layout, rows_of_stage

Order: TypeAlias = list[list[int]]
"""Total order of tasks on each row."""

Measure: TypeAlias = Literal["makespan", "span"]
"""What to make small: the time when the last row ends, or the longest time from a row's start to its end."""


@dataclass(frozen=True, slots=True)
class ListProblem:
    """Tasks to order on rows; every sequence but ``limit_bytes`` (one entry a row) has one entry a task.

    ``preds[t]`` holds (task, delay in seconds) pairs, data dependencies and given order alike: t starts no
    earlier than the end of each plus its delay. A task acquires ``hold_bytes`` on its row when it starts (F)
    and frees ``release_bytes`` when it ends (B or BW). ``limit_bytes`` may be infinite. A ``filler`` (BW) may
    wait for idle time. ``key`` is (stage, phase, microbatch): unique, it breaks ties and says which tasks
    belong to one microbatch.
    """

    rows: int
    row: Sequence[int]
    seconds: Sequence[float]
    preds: Sequence[Sequence[tuple[int, float]]]
    hold_bytes: Sequence[float]
    release_bytes: Sequence[float]
    limit_bytes: Sequence[float]
    filler: Sequence[bool]
    key: Sequence[tuple[int, int, int]]

    def topological(self) -> list[int]:
        """Return the tasks so that each follows its ``preds``.

        Raises:
            DirectiveError: the precedence is cyclic.
        """
        waiting = [len(preds) for preds in self.preds]
        followers: list[list[int]] = [[] for _ in self.row]
        for task, preds in enumerate(self.preds):
            for pred, _ in preds:
                followers[pred].append(task)
        order = [task for task, count in enumerate(waiting) if not count]
        for task in order:
            for follower in followers[task]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    order.append(follower)
        if len(order) < len(self.row):
            stuck = min((self.key[t], t) for t, count in enumerate(waiting) if count)[1]
            raise DirectiveError(
                f"the order is cyclic: {self.name(stuck)} waits for itself",
                expected="an order in which each action can follow what it needs",
                hint="drop or turn around one of the order edges between the actions concerned",
            )
        return order

    def name(self, task: int) -> str:
        """Return the text of a task, as of its action."""
        stage, phase, microbatch = self.key[task]
        return f"{stage}{Phase(phase).name}{microbatch}"


def peaks(problem: ListProblem, order: Order) -> list[float]:
    """Return the largest bytes held at once on each row."""
    result = []
    for tasks in order:
        held = peak = 0.0
        for task in tasks:
            held += problem.hold_bytes[task]
            peak = max(peak, held)
            held -= problem.release_bytes[task]
        result.append(peak)
    return result


def check_limits(problem: ListProblem) -> None:
    """Check that each row can hold what one microbatch needs there.

    Raises:
        InfeasibleError: a row cannot, whatever the order.
    """
    need: dict[tuple[int, int], float] = {}
    for task, row in enumerate(problem.row):
        place = row, problem.key[task][2]
        need[place] = need.get(place, 0.0) + problem.hold_bytes[task]
    for (row, _), least in sorted(need.items(), key=lambda item: (item[0][0], -item[1])):
        if least > slackened(problem.limit_bytes[row]):
            raise InfeasibleError(
                f"row {row} holds at least {least:.6g} bytes of activations, those of one microbatch, and its "
                f"limit is {problem.limit_bytes[row]:.6g}: {least - problem.limit_bytes[row]:.6g} too many"
            )


def slackened(limit_bytes: float) -> float:
    """Return a limit with room for rounding of sums of bytes."""
    return limit_bytes * (1 + 1e-9)


def pipeline_problem(
    layout: Layout,
    p: int,
    v: int,
    m: int,
    seconds: Sequence[tuple[float, float, float]],
    *,
    p2p_s: float = 0.0,
    split_backward: bool = True,
    hold_bytes: Sequence[float] | float = 1.0,
    limit_bytes: Sequence[float] | float = inf,
) -> ListProblem:
    """Build the problem of one training step on a pipeline.

    ``seconds[stage]`` is (F, BI, BW); a whole B takes BI + BW. ``p2p_s`` delays what crosses rows.
    ``hold_bytes`` is what one microbatch keeps at a stage from F to the end of BW (or B), ``limit_bytes`` of
    each row; one number stands for all. On a bidirectional layout the second half of the microbatches uses
    the second row of each stage.
    """
    places = rows_of_stage(layout, p, v)
    stages = len(places)
    holds = [hold_bytes] * stages if isinstance(hold_bytes, int | float) else list(hold_bytes)
    limits = [limit_bytes] * p if isinstance(limit_bytes, int | float) else list(limit_bytes)
    phases = (Phase.F, Phase.BI, Phase.BW) if split_backward else (Phase.F, Phase.B)
    width = len(phases)
    row: list[int] = []
    time: list[float] = []
    preds: list[tuple[tuple[int, float], ...]] = []
    hold: list[float] = []
    release: list[float] = []
    key: list[tuple[int, int, int]] = []
    for mb in range(m):
        at = [place[-1] if 2 * mb >= m + m % 2 else place[0] for place in places]
        base = mb * stages * width

        def crossing(one: int, other: int, at: Sequence[int] = at) -> float:
            return p2p_s if at[one] != at[other] else 0.0

        for stage in range(stages):
            task = base + stage * width
            forward, inputs, weights = seconds[stage]
            row += [at[stage]] * width
            time += [forward, inputs, weights] if split_backward else [forward, inputs + weights]
            preds.append(((task - width, crossing(stage - 1, stage)),) if stage else ())
            behind = ((task + width + 1, crossing(stage + 1, stage)),) if stage + 1 < stages else ()
            preds.append(((task, 0.0), *behind))
            if split_backward:
                preds.append(((task + 1, 0.0),))
            hold += [holds[stage]] + [0.0] * (width - 1)
            release += [0.0] * (width - 1) + [holds[stage]]
            key += [(stage, int(phase), mb) for phase in phases]
    filler = [phase == Phase.BW for _, phase, _ in key]
    return ListProblem(p, row, time, preds, hold, release, limits, filler, key)


def to_grid(problem: ListProblem, order: Order) -> Grid:
    """Return an order as a schedule of single-action slots."""
    return Grid(tuple(tuple((action_of(problem, t),) for t in tasks) for tasks in order))


def action_of(problem: ListProblem, task: int) -> Action:
    """Return the action that a task stands for."""
    stage, phase, microbatch = problem.key[task]
    return Action(stage, KIND_OF_PHASE[Phase(phase)], microbatch)
