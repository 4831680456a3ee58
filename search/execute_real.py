"""Race candidates on real ranks, and keep their times beside what the machine's profile predicts of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from piper_core.arch.record import Architecture
from piper_core.errors import PiperError
from piper_core.program.strategy import Strategy
from profiler.fingerprint import BUSY, busy_part
from profiler.race import HALF, SLOWER, Rules, race
from profiler.record import Sample
from search.execute import Device, Execution, Measured

if TYPE_CHECKING:
    from piper_core.runtime.trainer import Trainer

RULES = Rules(rounds=12, every=4)
TURN_S, LEAST, MOST = 0.3, 2, 10
"""A turn is as many steps as take so long, within limits."""


class Runner:
    """A candidate on its ranks, kept from turn to turn where there is room for all at once."""

    def __init__(self, index: int, start: Callable[[], Trainer], keep: bool) -> None:
        self.index, self._start, self._keep = index, start, keep
        self._trainer: Trainer | None = None
        self._count = 0
        self.rounds: list[float] = []
        self.losses: list[float] = []
        self.peak, self.reason = 0, ""

    def warm_up(self) -> None:
        """Start the ranks, look at memory, and say how many steps a turn has."""
        self._guarded(self._warm)

    def turn(self) -> None:
        """Run one turn and note the median of its steps."""
        self._guarded(self._timed)

    def _guarded(self, what: Callable[[], None]) -> None:
        """Do it; a failure is noted, and ends this candidate alone."""
        try:
            what()
            if not self._keep:
                self.close()
        except PiperError as error:
            self.reason, self.rounds = str(error), []
            self.close()

    def _warm(self) -> None:
        trainer = self._trainer = self._trainer or self._start()
        self._step("memory")
        assert trainer.last is not None, "a step has been taken"
        self.peak = max(self.peak, *(each.peak_bytes for each in trainer.last.ranks))
        took = min(self._step("run") for _ in range(2))
        self._count = self._count or min(MOST, max(LEAST, round(TURN_S / max(took, 1e-6))))

    def _timed(self) -> None:
        if self._trainer is None:
            self._warm()
        self.rounds.append(median(self._step("run") for _ in range(self._count)))

    def _step(self, how: Literal["run", "memory"]) -> float:
        from piper_core.runtime.data import synthetic

        trainer = self._trainer
        assert trainer is not None, "ranks are there while steps run"
        architecture = trainer.architecture
        assert architecture is not None, "a search is of an architecture"
        batch = synthetic(trainer.slicing.batch, trainer.seq_len, architecture.vocab)(trainer.steps)
        loss = trainer.step(batch, how)
        if len(self.losses) < 4:
            self.losses.append(loss)
        assert trainer.last is not None, "a step has been taken"
        return trainer.last.seconds

    def close(self) -> None:
        """End the ranks."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def measure(
    strategies: Sequence[Strategy], architecture: Architecture, device: Device, ranks: int, address: str | None,
    timeout_s: float, say: Callable[[str], None],
) -> Execution:  # fmt: skip
    """Race strategies, the best guess first, each on ``ranks`` processes.

    Raises:
        ConfigError: no such cluster.
    """
    from piper_core.runtime.ray_session import RaySession
    from piper_core.runtime.trainer import Trainer

    together = device == "cpu"  # a second set of GPUs need not be there
    dtype = "float32" if device == "cpu" else "bfloat16"

    def starter(strategy: Strategy) -> Callable[[], Trainer]:
        return lambda: Trainer(architecture, strategy, device=device, address=address, dtype=dtype, timeout_s=timeout_s)

    busy = busy_part() if device == "cpu" and address is None else 0.0
    runners = [Runner(i, starter(each), together) for i, each in enumerate(strategies)]
    with ExitStack() as stack:
        session = RaySession(address, ranks * (len(runners) if together else 1))
        stack.callback(session.close)
        for runner in runners:
            stack.callback(runner.close)
            say(f"starting {ranks} ranks for candidate {runner.index + 1}")
            runner.warm_up()
        found = run_race(runners, say)
    kept, why = None, "the ranks are on another machine"
    if address is None:
        kept, why = _keep(strategies, found.measured, architecture, device, dtype, busy)
    cores = (os.cpu_count() or 0) if device == "cpu" and address is None else 0
    return replace(found, ranks=ranks, cores=cores, kept=kept, not_kept=why)


def run_race(runners: Sequence[Runner], say: Callable[[str], None] = lambda text: None) -> Execution:
    """Race runners that are warm; one alone runs all its rounds up to the first look."""
    ready = {str(runner.index): runner for runner in runners if not runner.reason}
    number = 0

    def one_round(names: Sequence[str]) -> Mapping[str, float]:
        nonlocal number
        number += 1
        say(f"round {number}: {len(names)} in the race")
        for name in names if number % 2 else reversed(names):  # nobody comes first each time
            ready[name].turn()
        return {name: ready[name].rounds[-1] for name in names if not ready[name].reason}

    if len(ready) == 1:
        (only,) = ready
        while number < RULES.every and not ready[only].reason:
            one_round([only])
    if not ready:
        return Execution(tuple(_measured(runner, "") for runner in runners))
    went = race(list(ready), one_round, RULES)
    words = {SLOWER: "slower beyond doubt", HALF: "in the slower half"}
    out = {int(name): f"{words[why]} after round {at}" for name, (at, why) in went.out.items() if why in words}
    measured = tuple(_measured(runner, out.get(runner.index, "")) for runner in runners)
    return Execution(measured, int(went.winner), went.decided, went.ended)


def _measured(runner: Runner, out: str) -> Measured:
    return Measured(
        runner.index,
        tuple(runner.rounds),
        runner.peak,
        tuple(runner.losses),
        runner.reason,
        "" if runner.reason else out,
    )


def _keep(
    strategies: Sequence[Strategy], measured: Sequence[Measured], architecture: Architecture, device: Device,
    dtype: str, busy: float,
) -> tuple[Path | None, str]:  # fmt: skip
    """Add the times to this machine's profile of the model; return its place, or why they are not kept."""
    from search.history import profile_of, remember

    if busy > BUSY:
        return None, f"other programs took {busy:.0%} of this machine's cores, so times may be off"
    path = profile_of(strategies[0], architecture, device, dtype)
    if path is None:
        return None, "there is no profile of this model on this machine to set them beside (piper-profile)"
    for each in measured:
        if len(each.rounds_s) > 1:
            remember(strategies[each.candidate], path, Sample(each.rounds_s))
    return path, ""
