"""The replay says the same compiled and as it is, in plain numbers."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from piper_core.jit import Loops
from piper_core.schedule.families import FAMILIES, get_family
from search import replay as module
from search.replay import PHASES, Times, numbered, peaks_of, replay
from search.row_parts import peak_of


def loops(*, compiled: bool) -> Loops:
    made = Loops(module.held, module.sort, module.run)
    if compiled:
        made._compile(cache=True)
    else:
        made._turns = -(10**12)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_and_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, rng = FAMILIES[name], Random(7)
    for pp in (p for p in (2, 4, 6) if p in family.degrees()):
        for v in (v for v in islice(family.virtual_stages(pp), 3) if v <= 3):
            m = next(m for m in (2 * pp, 4 * pp) if m in family.microbatches(pp, v))
            order = numbered(name, pp, m, v)
            stages = order.results // 2 // m

            def some(n: int) -> list[float]:
                return [rng.uniform(0.5, 2.0) for _ in range(n)]

            first = [{s: (rng.uniform(0, 3), rng.uniform(0, 5)) for s in range(stages)} for _ in range(pp)]
            size = stages * PHASES
            times = Times(some(size), some(size), some(size), some(size), 0.1, some(pp), first)
            saved, workspace = some(stages), some(stages)
            found = []
            for compiled in (False, True):
                monkeypatch.setattr(module, "LOOPS", loops(compiled=compiled))
                assert numbered.function(name, pp, m, v).listed == order.listed
                found.append((replay(order, times), peaks_of(order, saved, workspace)))
            (plain, peaks), (quick, quick_peaks) = found
            assert plain == quick
            assert peaks == quick_peaks
            grid = get_family(name).grid(pp, m, v)
            assert peaks == pytest.approx([peak_of(row, saved, workspace) for row in grid.rows])
            numbers = [*quick.rows, *quick_peaks, *(x for row in quick.last for pair in row.values() for x in pair)]
            assert {type(number) for number in numbers} == {float}  # what JSON takes


def test_whole_numbers_are_seconds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start at 0, or stages that hold a whole number of bytes, do not make the compiled loops count in whole
    numbers: what a search proves would depend on when it began to run them."""
    order = numbered("1f1b", 2, 4, 1)
    seconds = [0.75] * (2 * PHASES)
    times = Times(seconds, seconds, seconds, [0] * len(seconds), 0.1, [0, 0], [{}, {}])
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(module, "LOOPS", loops(compiled=compiled))
        found.append((replay(order, times), peaks_of(order, [1, 2], [0.5, 0.25])))
    assert found[0] == found[1]
    assert found[1][0].rows[0] == pytest.approx(10 * 0.75 + 4 * 0.1)  # one after the other, with four messages
