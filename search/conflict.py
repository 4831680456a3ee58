"""When nothing fits: the smallest set of facts that conflict, and the nearest changes that would help, with numbers."""

from __future__ import annotations

import time
from dataclasses import replace

from piper_core.errors import DirectiveError, InfeasibleError, PlanError
from search.candidate import Score
from search.empty import Asked, asked_of, only
from search.generators.best_first import BestFirst
from search.problem import Problem
from search.space import Configuration, Space

GIB = 1 << 30
PATIENCE_S = 20.0
"""Time for all that is tried here."""
TRIES = 3
"""Leanest configurations of a changed problem that are built before it counts as too big."""


def explain(problem: Problem, space: Space) -> str:
    """Return lines that say which of what was asked for conflict, and what would fit in their place."""
    return "\n".join(_Explainer(problem, space).lines())


class _Explainer:
    """Tries changes of one problem of which nothing fits, for as long as there is time."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.problem, self.space = problem, space
        self.end_s = time.perf_counter() + PATIENCE_S

    def lines(self) -> list[str]:
        core = self.conflict(asked_of(self.space))
        room = f"{self.problem.cluster.device.memory_bytes / GIB:.1f} GiB a GPU"
        asked = [self._text(each) for each in core]
        asked += [f"--gpus {self.space.gpus}", f"--seq-len {self.space.seq_len}", room]
        found = [f"these conflict: {', '.join(asked)}"]
        found += [f"would fit: {text}" for text in self.changes(core)]
        return found

    def conflict(self, asked: list[Asked]) -> list[Asked]:
        """Return what was asked for each of which is needed for nothing to fit: one without which still nothing does is
        left out."""
        core = list(asked)
        for each in asked:
            without = [other for other in core if other != each]
            if self.fitting(self.problem, only(self.space, without)) is None:
                core = without
        return core

    def changes(self, core: list[Asked]) -> list[str]:
        """Return changes of one thing that make something fit, each with what would."""
        found = []
        for each in core:
            told = self.fitting(self.problem, only(self.space, [other for other in core if other != each]))
            if told is not None:
                found.append(_said(f"without {self._text(each)}", *told))
        for times in (2, 4, 8):
            told = self._with(gpus=self.space.gpus * times)
            if told is not None:
                found.append(_said(f"--gpus {self.space.gpus * times}", *told))
                break
        half = self.space.seq_len // 2
        while half >= 256:
            told = self._with(seq_len=half)
            if told is not None:
                found.append(_said(f"--seq-len {half}", *told))
                break
            half //= 2
        return found

    def _text(self, each: Asked) -> str:
        option, axis = each
        values = self.space.fix[axis] if option == "fix" else self.space.forbid[axis]
        return f"--{option} {axis}={','.join(values)}"

    def _with(self, gpus: int | None = None, seq_len: int | None = None) -> tuple[Configuration, Score] | None:
        old, space = self.problem, self.space
        gpus, seq_len = gpus or space.gpus, seq_len or space.seq_len
        changed = Problem(old.architecture, old.cluster, gpus, old.global_batch, seq_len)
        return self.fitting(changed, replace(space, gpus=gpus, seq_len=seq_len))

    def fitting(self, problem: Problem, space: Space) -> tuple[Configuration, Score] | None:
        """Return one of the leanest configurations that fits, None where there is none among those tried in time."""
        capacity = problem.cluster.device.memory_bytes
        leanest = BestFirst(space, problem.bounds, capacity, objective="memory")
        for _ in range(TRIES):
            if time.perf_counter() > self.end_s:
                return None
            for config in leanest.ask(1, deadline_s=self.end_s):
                try:
                    score = problem.score(config)
                except (DirectiveError, PlanError, InfeasibleError):
                    leanest.tell(config, None)
                    continue
                leanest.tell(config, score)
                if score.fits == "yes":
                    return config, score
        return None


def _said(change: str, config: Configuration, score: Score) -> str:
    peak, room = score.worst_row_bytes / GIB, score.margin_bytes / GIB
    return f"{change}: {config} takes {score.step_time_s:.3f} s a step and {peak:.1f} GiB, {room:.1f} to spare"


def why_not(problem: Problem, space: Space, choice: str, best: Score) -> str:
    """Return why a choice such as ``zero=3`` lost: what its best configuration would take, or that none fits.

    Raises:
        ConfigError: not an axis and a value, or one that no configuration has.
    """
    from search.engine import search
    from search.space import parse_fix

    fixed = parse_fix([choice], "--explain")
    for axis, values in fixed.items():
        if set(values) <= set(space.forbid.get(axis, ())):
            return f"{choice} lost: --forbid {axis}={','.join(space.forbid[axis])} rules it out"
    narrowed = replace(space, fix={**space.fix, **fixed})
    try:
        other = search(problem, narrowed, top=1, budget_s=10.0, tune=False).best
    except InfeasibleError as error:
        return f"{choice} lost: {error}"
    slower = other.score.step_time_s - best.step_time_s
    if slower <= 0:
        return f"{choice} did not lose: {other.config} takes {other.score.step_time_s:.3f} s a step"
    a, b = best.breakdown, other.score.breakdown
    causes = sorted(((b.get(name, 0.0) - a.get(name, 0.0), name) for name in {*a, *b}), key=lambda pair: -abs(pair[0]))
    parts = ", ".join(f"{seconds:+.3f} s {name}" for seconds, name in causes[:3] if abs(seconds) > 0.02 * slower)
    return (
        f"{choice} lost: the best with it, {other.config}, takes {other.score.step_time_s:.3f} s a step, "
        f"{slower / best.step_time_s:.1%} more: {parts}"
    )
