"""The winner by measurement: quicker by more than noise, or the one that was predicted to be the best."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from piper_core.errors import RunError
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy
from search.execute import CONTEXT_BYTES, PROCESS_BYTES, Execution, Measured, device_of, enough, how_many
from search.execute_real import RULES, Runner, run_race

if TYPE_CHECKING:
    from piper_core.runtime.trainer import Trainer

NOISE = (1.0, 1.02, 0.98, 1.01, 0.99, 1.0)


def of(candidate: int, seconds: float, noise: tuple[float, ...] = NOISE) -> Measured:
    return Measured(candidate, tuple(seconds * each for each in noise), 1 << 20, (2.0,))


FAILED = Measured(0, reason="rank 1 at 1B0: its process died")


class Planted(Runner):
    """A runner that takes planted times, drifting with the round, and fails in a turn."""

    def __init__(self, index: int, seconds: float, *, noise: float = 0.003, fails: int = 99, seed: int = 0) -> None:
        def start() -> Trainer:
            raise AssertionError("no ranks are started here")

        super().__init__(index, start, keep=True)
        self.seconds, self.noise, self.fails, self.chance = seconds, noise, fails, random.Random(seed + 100 * index)

    def _timed(self) -> None:
        at = len(self.rounds)
        if at >= self.fails:
            raise RunError("rank 1 at 1B0: its process died")
        drift = random.Random(at).uniform(1.0, 2.0)
        self.rounds.append(self.seconds * drift * self.chance.gauss(1.0, self.noise))


def test_the_quickest_wins_beyond_doubt() -> None:
    found = run_race([Planted(0, 1.1), Planted(1, 1.0), Planted(2, 1.3)])
    assert (found.winner, found.decided, found.ended) == (1, True, "one left")
    assert len(found.measured[2].rounds_s) < len(found.measured[1].rounds_s) + 1
    assert found.measured[2].out.startswith("slower beyond doubt after round")


def test_within_noise_the_prediction_stands() -> None:
    found = run_race([Planted(0, 1.001, noise=0.1), Planted(1, 1.0, noise=0.1)])
    assert (found.winner, found.decided) == (0, False)
    assert "within noise" in "\n".join(replace(found, ranks=2).lines([1.0, 1.0]))


def test_equals_end_early() -> None:
    found = run_race([Planted(0, 1.0, noise=0.001), Planted(1, 1.0, noise=0.001)])
    assert found.ended == "all left are as good"
    assert len(found.measured[0].rounds_s) < RULES.rounds
    assert "more runs would not tell them apart" in "\n".join(replace(found, ranks=2).lines([1.0, 1.0]))


def test_one_that_fails_leaves_the_race_to_the_others() -> None:
    found = run_race([Planted(0, 1.0, fails=2), Planted(1, 1.1), Planted(2, 1.4)])
    assert (found.winner, found.decided) == (1, True)
    assert found.measured[0].reason == "rank 1 at 1B0: its process died"
    assert found.measured[0].rounds_s == ()
    alone = run_race([Planted(0, 1.0, fails=2), Planted(1, 1.1)])
    assert (alone.winner, alone.decided) == (1, False)
    assert "only row 2 ran" in "\n".join(replace(alone, ranks=2).lines([1.0, 1.0]))


def test_one_alone_is_measured_up_to_the_first_look() -> None:
    found = run_race([Planted(0, 1.0)])
    assert len(found.measured[0].rounds_s) == RULES.every
    assert (found.winner, found.decided) == (0, False)


def test_none_that_runs() -> None:
    runner = Planted(0, 1.0)
    runner.reason = "no memory"
    found = run_race([runner])
    assert (found.winner, found.decided, found.measured[0].reason) == (0, False, "no memory")


def test_what_is_said_of_the_winner() -> None:
    found = Execution((of(0, 2.0), of(1, 1.0)), winner=1, decided=True, ranks=4)
    assert found.header()["step_time_s"] == pytest.approx(1.0)
    text = "\n".join(found.lines([1.1, 1.2, 1.3]))
    assert "winner by measurement, beyond doubt: row 2" in text
    assert "2  measured 1 s a step" in text
    assert "measured / predicted 0.83" in text
    assert found.to_data()["mode"] == "real"
    assert "4 real ranks that share 2 cores" in replace(found, cores=2).lines([1.1, 1.2])[0]
    assert replace(found, not_kept="a reason").lines([1.1, 1.2])[-1] == "not kept: a reason"


def test_lines_of_failures() -> None:
    assert "failed: rank 1 at 1B0" in "\n".join(Execution((FAILED,)).lines([1.0]))
    assert Execution(reason="torch is not installed").lines([1.0]) == ["not executed: torch is not installed"]


def test_which_machine_is_enough() -> None:
    strategy = Strategy(Header(cluster="cpu", mesh=Mesh((("dp", 4),))), Program(()))
    gpus = replace(strategy, header=replace(strategy.header, cluster="p4de"))
    assert (device_of(strategy), device_of(gpus)) == ("cpu", "cuda")
    assert enough(4, "cpu", strategy)
    assert not enough(64, "cpu", strategy)
    assert not enough(4, "cpu", gpus)
    assert enough(4, "cpu", gpus, named=True)


def test_as_many_are_run_as_memory_holds() -> None:
    header = Header(cluster="cpu", gpus=2, predicted={"peak_memory_bytes": [CONTEXT_BYTES, CONTEXT_BYTES + 1e9]})
    four = [Strategy(header, Program(()))] * 4
    each = 2 * (PROCESS_BYTES + 2e9)
    assert [how_many(four, 2, free) for free in (0.0, each - 1, each, 2.5 * each, 100 * each)] == [0, 0, 1, 2, 3]
