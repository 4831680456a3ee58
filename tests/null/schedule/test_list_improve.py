"""Tasks are moved into idle time the same by loops that are compiled and by those that are not."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from piper_core.jit import Loops
from piper_core.schedule import list_improve as module
from piper_core.schedule.grid import Layout
from piper_core.schedule.list_decode import Decoded, Network, replay
from piper_core.schedule.list_improve import compact
from piper_core.schedule.list_problem import peaks, pipeline_problem
from piper_core.schedule.list_scheduler import list_schedule


def loops(*, compiled: bool) -> Loops:
    made = Loops(module.place)
    if compiled:
        made._compile(cache=True)
    else:
        made._turns = -(10**12)
    return made


@pytest.mark.parametrize("limit", [4.0, 9.0, inf])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("layout", "pp", "v"), [(Layout.LOOP, 3, 2), (Layout.V, 4, 2), (Layout.BIDIRECTIONAL, 4, 1)])
def test_compiled_and_plain(
    layout: Layout, pp: int, v: int, split: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, there and back in time, with rows that may start late; memory is kept where the start kept it."""
    rng, stages = Random(3), pp if layout is Layout.BIDIRECTIONAL else pp * v
    seconds = [(rng.uniform(0.5, 2.0), rng.uniform(0.5, 2.0), rng.uniform(0.5, 2.0)) for _ in range(stages)]
    problem = pipeline_problem(layout, pp, v, 12, seconds, p2p_s=0.1, split_backward=split, limit_bytes=[limit] * pp)
    network = Network.of(problem)
    found: list[list[Decoded]] = []
    for compiled in (False, True):
        monkeypatch.setattr(module, "LOOPS", loops(compiled=compiled))
        order = list_schedule(problem, effort=0)
        start, rng = [float(at) for at in _starts(network, order)], Random(5)
        passes: list[Decoded] = []
        for i in range(12):
            late = [rng.uniform(0.0, 1.0) for _ in range(pp)] if i % 3 == 0 else None
            passes.append(compact(network if i % 2 else network.reversed(), start, late))
            done = passes[-1]
            start = [done.makespan_s - at - s for at, s in zip(done.start_s, problem.seconds, strict=True)]
        found.append(passes)
    plain, quick = found
    assert plain == quick
    assert {type(at) for at in quick[-1].start_s} == {float}
    assert {type(task) for row in quick[-1].order for task in row} == {int}
    assert all(sorted(t for row in each.order for t in row) == sorted(network.order) for each in quick)
    assert all(peak <= limit * (1 + 1e-9) for peak in peaks(problem, quick[-1].order))


def _starts(network: Network, order: list[list[int]]) -> list[float]:
    """Return starts that turn the schedule of an order round in time, for a first pass back."""
    done = replay(network, order)
    assert done is not None
    return [done.makespan_s - at - s for at, s in zip(done.start_s, network.problem.seconds, strict=True)]
