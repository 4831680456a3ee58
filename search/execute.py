"""Run what a search found: the best few candidates for real where there are enough devices, else a rehearsal of the
winner.

Real candidates are kept apart from each other's luck: they take turns, round after round, in an order that turns
around. A winner by measurement is one whose paired differences from another, round by round, are more than noise; where
they are not, the prediction's order stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf, log, sqrt
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any, Literal

from piper_core.errors import PiperError

if TYPE_CHECKING:
    from piper_core.arch.record import Architecture
    from piper_core.program.strategy import Strategy
    from piper_core.runtime.rehearsal import Rehearsal
    from piper_core.runtime.trainer import Trainer

Device = Literal["cpu", "cuda"]
CPU = "cpu"
"""Cluster whose devices are processes of a host."""
ROUNDS = 6
_QUANTILE = 2.571
"""Of Student's distribution with five degrees of freedom, two-sided 5 %: differences of six rounds."""
_TURN_S, _LEAST, _MOST = 0.5, 2, 10
"""A turn is as many steps as take so long, within limits."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate on real ranks: the median step time of each round, the largest peak of a rank's tensors, the losses
    of its first steps; or the reason why there is none."""

    candidate: int
    rounds_s: tuple[float, ...] = ()
    peak_bytes: int = 0
    losses: tuple[float, ...] = ()
    reason: str = ""

    @property
    def step_time_s(self) -> float:
        """Median over rounds; infinite for one that failed."""
        return median(self.rounds_s) if self.rounds_s else inf

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON, and for the header of a strategy file."""
        if self.reason:
            return {"failed": self.reason}
        return {
            "step_time_s": self.step_time_s, "rounds_s": list(self.rounds_s), "peak_tensor_bytes": self.peak_bytes,
            "losses": list(self.losses),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of it: measurements by candidate and the one that wins (``decided``: by more than noise), or a
    rehearsal of the first candidate, or the ``reason`` why neither."""

    measured: tuple[Measured, ...] = ()
    winner: int = 0
    decided: bool = False
    rehearsal: Rehearsal | None = None
    reason: str = ""
    ranks: int = 0

    def header(self) -> dict[str, Any]:
        """Return what the header of the winner's strategy file says of it."""
        if self.rehearsal is not None:
            return {"mode": "rehearsal", "of": self.rehearsal.of, "largest_difference": self.rehearsal.error}
        mine = next((each for each in self.measured if each.candidate == self.winner), None)
        return {"mode": "real", **mine.to_data()} if mine is not None else {"failed": self.reason}

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {
            "mode": "real" if self.measured else "rehearsal" if self.rehearsal else "none",
            "measured": [{"candidate": each.candidate, **each.to_data()} for each in self.measured],
            "winner": self.winner,
            "decided": self.decided,
            "rehearsal": asdict(self.rehearsal) if self.rehearsal else None,
            "reason": self.reason or None,
        }

    def lines(self, predicted_s: Sequence[float]) -> list[str]:
        """Return what to print; ``predicted_s`` are the step times of the candidates."""
        if self.rehearsal is not None:
            return [f"the winner was executed in {self.rehearsal}"]
        if not self.measured:
            return [f"the winner was not executed: {self.reason}"]
        made = [f"executed on {self.ranks} real ranks, {ROUNDS} rounds in turns:"]
        for each in self.measured:
            wanted = predicted_s[each.candidate]
            if each.reason:
                made.append(f"  {each.candidate + 1}  failed: {each.reason}")
                continue
            low, high = min(each.rounds_s), max(each.rounds_s)
            made.append(
                f"  {each.candidate + 1}  measured {each.step_time_s:.4g} s a step ({low:.4g} to {high:.4g}), "
                f"predicted {wanted:.4g} s, measured / predicted {each.step_time_s / wanted:.2f}, "
                f"peak {each.peak_bytes / 2**20:,.1f} MiB"
            )
        ran = [each for each in self.measured if not each.reason]
        if not ran:
            made.append("none of them ran; the prediction's winner stands")
        elif self.decided:
            made.append(f"winner by measurement, by more than noise: row {self.winner + 1}, which the file is of")
        elif len(ran) > 1:
            made.append(
                f"differences are within noise: of the quickest, {self.winner + 1} was predicted to be the best"
            )
        else:
            made.append(f"only row {self.winner + 1} ran, which the file is of")
        return made


def device_of(strategy: Strategy) -> Device:
    """Return the kind of device that a strategy's cluster has."""
    return "cpu" if strategy.header.cluster == CPU else "cuda"


def enough(ranks: int, device: Device, strategy: Strategy, *, named: bool = False) -> bool:
    """Say whether this machine has a device for each rank: CUDA devices; or, for a cluster of CPU processes or where
    the CPU was ``named``, as many processes as such a host is taken to carry."""
    from profiler.spec import load_cluster

    if device == "cpu":
        return ranks <= load_cluster(CPU).gpus_per_node and (named or strategy.header.cluster == CPU)
    from piper_core.runtime.devices import cuda_devices

    return ranks <= cuda_devices()


def execute(
    strategies: Sequence[Strategy], architecture: Architecture, k: int, *, address: str | None = None,
    timeout_s: float = 60.0, say: Callable[[str], None] = lambda text: None,
) -> Execution:  # fmt: skip
    """Run the first ``k`` strategies on real ranks where there are enough devices, else rehearse the first one.

    A candidate that fails is recorded with its reason, and the others go on.
    """
    first = strategies[0]
    device = device_of(first)
    ranks = first.header.gpus or 1
    try:
        if k < 1 or not (address or enough(ranks, device, first)):
            from piper_core.runtime.rehearsal import rehearse

            say("rehearsing the winner")
            return Execution(rehearsal=rehearse(first, architecture))
        return _measure(strategies[:k], architecture, device, ranks, address, timeout_s, say)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "ray"):
            raise
        return Execution(reason=f"{error.name} is not installed")
    except PiperError as error:
        return Execution(reason=str(error))


class _Runner:
    """A candidate on its ranks, kept from turn to turn where there is room for all at once."""

    def __init__(self, index: int, start: Callable[[], Trainer], keep: bool) -> None:
        self.index, self._start, self._keep = index, start, keep
        self._trainer: Trainer | None = None
        self._count = 0
        self.rounds: list[float] = []
        self.losses: list[float] = []
        self.peak, self.reason = 0, ""

    def turn(self, *, warm: bool) -> None:
        """Run one turn and note its median; the first of all (``warm``) says how many steps a turn has."""
        try:
            trainer = self._trainer or self._start()
            self._trainer = trainer
            if warm or not self._keep:
                self._step(trainer, "memory")
                assert trainer.last is not None, "a step has been taken"
                self.peak = max(each.peak_bytes for each in trainer.last.ranks)
                took = min(self._step(trainer, "run") for _ in range(2))
                self._count = self._count or min(_MOST, max(_LEAST, round(_TURN_S / max(took, 1e-6))))
            if not warm:
                self.rounds.append(median(self._step(trainer, "run") for _ in range(self._count)))
            if not self._keep:
                self.close()
        except PiperError as error:
            self.reason, self.rounds = str(error), []
            self.close()

    def _step(self, trainer: Trainer, how: Literal["run", "memory"]) -> float:
        from piper_core.runtime.data import synthetic

        architecture = trainer.architecture
        assert architecture is not None, "a search is of an architecture"
        batch = synthetic(trainer.slicing.batch, trainer.seq_len, architecture.vocab)(trainer.steps)
        loss = trainer.step(batch, how)
        if len(self.losses) < 4:
            self.losses.append(loss)
        assert trainer.last is not None, "a step has been taken"
        return trainer.last.seconds

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def measured(self) -> Measured:
        return Measured(self.index, tuple(self.rounds), self.peak, tuple(self.losses), self.reason)


def _measure(
    strategies: Sequence[Strategy], architecture: Architecture, device: Device, ranks: int, address: str | None,
    timeout_s: float, say: Callable[[str], None],
) -> Execution:  # fmt: skip
    from piper_core.runtime.ray_session import RaySession
    from piper_core.runtime.trainer import Trainer

    together = device == "cpu"  # a second set of GPUs need not be there
    dtype = "float32" if device == "cpu" else "bfloat16"

    def starter(strategy: Strategy) -> Callable[[], Trainer]:
        return lambda: Trainer(architecture, strategy, device=device, address=address, dtype=dtype, timeout_s=timeout_s)

    runners = [_Runner(i, starter(each), together) for i, each in enumerate(strategies)]
    with ExitStack() as stack:
        session = RaySession(address, ranks * (len(runners) if together else 1))
        stack.callback(session.close)
        for runner in runners:
            stack.callback(runner.close)
            say(f"starting {ranks} ranks for candidate {runner.index + 1}")
            runner.turn(warm=True)
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            for runner in runners if number % 2 == 0 else reversed(runners):
                if not runner.reason:
                    runner.turn(warm=False)
    found = tuple(runner.measured() for runner in runners)
    winner, decided = choose(found)
    return Execution(found, winner, decided, ranks=ranks)


def choose(measured: Sequence[Measured]) -> tuple[int, bool]:
    """Return the candidate that wins, and whether by more than noise: the first in the prediction's order that the
    quickest one does not beat clearly."""
    ran = [each for each in measured if not each.reason]
    if not ran:
        return 0, False
    quickest = min(ran, key=lambda each: each.step_time_s)
    for each in ran:
        if each is quickest or not clearly_quicker(quickest.rounds_s, each.rounds_s):
            rest = [other for other in ran if other is not each]
            clear = bool(rest) and all(clearly_quicker(each.rounds_s, other.rounds_s) for other in rest)
            return each.candidate, clear
    raise AssertionError("the quickest is among those that ran")


def clearly_quicker(one: Sequence[float], other: Sequence[float]) -> bool:
    """Say whether the logarithms of paired ratios are below 0 by more than noise (paired t test, two-sided 5 %)."""
    logs = [log(a / b) for a, b in zip(one, other, strict=True)]
    return mean(logs) + _QUANTILE * stdev(logs) / sqrt(len(logs)) < 0
