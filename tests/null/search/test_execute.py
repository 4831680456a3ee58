"""The winner by measurement: quicker by more than noise, or the one that was predicted to be the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy
from search.execute import Execution, Measured, choose, clearly_quicker, device_of, enough

NOISE = (1.0, 1.02, 0.98, 1.01, 0.99, 1.0)


def of(candidate: int, seconds: float, noise: tuple[float, ...] = NOISE) -> Measured:
    return Measured(candidate, tuple(seconds * each for each in noise), 1 << 20, (2.0,))


FAILED = Measured(0, reason="rank 1 at 1B0: its process died")


@pytest.mark.parametrize(
    ("measured", "winner", "decided"),
    [
        ([of(0, 1.0), of(1, 1.3)], 0, True),
        ([of(0, 1.3), of(1, 1.0)], 1, True),
        ([of(0, 1.001), of(1, 1.0, (*NOISE[3:], *NOISE[:3]))], 0, False),
        ([of(0, 1.4), of(1, 1.001), of(2, 1.0, (*NOISE[3:], *NOISE[:3]))], 1, False),
        ([FAILED, of(1, 9.0)], 1, False),
        ([FAILED], 0, False),
    ],
)
def test_choose(measured: list[Measured], winner: int, decided: bool) -> None:
    assert choose(measured) == (winner, decided)


def test_a_slow_round_for_all_is_no_noise() -> None:
    """Rounds are paired: what slows both in a round does not count."""
    rounds = (1.0, 3.0, 1.1, 2.0, 5.0, 1.0)
    assert clearly_quicker(rounds, [1.1 * each for each in rounds])
    assert not clearly_quicker([1.1 * each for each in rounds], rounds)


def test_what_is_said_of_the_winner() -> None:
    found = Execution((of(0, 2.0), of(1, 1.0)), winner=1, decided=True, ranks=4)
    assert found.header()["step_time_s"] == pytest.approx(1.0)
    text = "\n".join(found.lines([1.1, 1.2, 1.3]))
    assert "winner by measurement, by more than noise: row 2" in text
    assert "2  measured 1 s a step" in text
    assert "measured / predicted 0.83" in text
    assert found.to_data()["mode"] == "real"


def test_lines_of_failures() -> None:
    assert "failed: rank 1 at 1B0" in "\n".join(Execution((FAILED,)).lines([1.0]))
    assert Execution(reason="torch is not installed").lines([1.0]) == [
        "the winner was not executed: torch is not installed"
    ]


def test_which_machine_is_enough() -> None:
    strategy = Strategy(Header(cluster="cpu", mesh=Mesh((("dp", 4),))), Program(()))
    gpus = replace(strategy, header=replace(strategy.header, cluster="p4de"))
    assert (device_of(strategy), device_of(gpus)) == ("cpu", "cuda")
    assert enough(4, "cpu", strategy)
    assert not enough(64, "cpu", strategy)
    assert not enough(4, "cpu", gpus)
    assert enough(4, "cpu", gpus, named=True)
