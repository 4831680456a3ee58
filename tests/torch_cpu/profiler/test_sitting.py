"""A sitting keeps what it measures, goes on where it was, and stops in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from piper_core.arch.presets import preset
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from profiler.cli import main
from profiler.form import to_data
from profiler.measure import sitting
from profiler.measure.chunks import Shape, Subject, shapes, subjects
from profiler.measure.pace import Pace
from profiler.measure.sitting import Sitting, Wanted
from profiler.measure.transfers import Measurements
from profiler.record import Sample, Transfer
from profiler.store import load, profiles
from tests.torch_cpu.profiler.fake import FakeClock

LLAMA = replace(preset("tiny-llama"), layers=2)
SEQ = 32


def sit(path: Path | None, **options: object) -> Sitting:
    return Sitting(LLAMA, Wanted(tuple(shapes(LLAMA, SEQ, **options))), path)  # type: ignore[arg-type]  # by name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(sitting, "clock_of", lambda *_, **__: made)
    monkeypatch.setattr(Pace, "read", lambda pace: pace.seen.append(1e-3) or 1e-3)
    monkeypatch.setattr(sitting, "subjects", traced)
    return made


KNOWN: dict[object, list[Subject]] = {}


def traced(architecture: Architecture, wanted: tuple[Shape, ...], dtype: torch.dtype, device: str) -> list[Subject]:
    """Trace as a sitting does, each set of shapes once for all tests."""
    if wanted not in KNOWN:
        KNOWN[wanted] = subjects(architecture, wanted, dtype, device)
    return KNOWN[wanted]


def run(made: Sitting, budget_s: float = 100.0) -> list[str]:
    told: list[str] = []
    made.run(made.trace(), perf_counter() + budget_s, lambda text, done, count: told.append(text))
    return told


def test_all_that_was_wanted_is_there_and_on_disk(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    made = sit(path)
    told = run(made)
    assert made.missing(made.trace()) == []
    assert told[-1] == "done"
    assert "18 chunks of b1 s32" in told
    assert to_data(load(path)) == to_data(made.found)
    assert len(made.found.updates) == 5
    assert made.found.conditions


def test_it_goes_on_where_it_was(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    run(sit(path))
    before = load(path)
    more = sit(path, micro_batch=(1, 2))
    told = run(more)
    assert not any("b1" in text for text in told)
    assert any("b2" in text for text in told)
    after = load(path)
    assert set(before.sites) < set(after.sites)
    assert all(after.chunks[digest] == each for digest, each in before.chunks.items())


def test_ctrl_c_keeps_what_is_measured(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    clock.ends = 150
    made = sit(path, micro_batch=(1, 2))
    with pytest.raises(KeyboardInterrupt):
        run(made)
    found = load(path)
    assert 0 < len(found.chunks) < len(made.trace())
    clock.ends = 0
    run(sit(path, micro_batch=(1, 2)))
    assert len(load(path).chunks) == len(made.trace())


def test_a_budget_that_is_gone_measures_nothing(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    with pytest.raises(ConfigError, match=r"the budget was gone when .* chunks had been traced.* give .* s more"):
        run(sit(path), budget_s=-1.0)
    assert not path.exists()


def test_nothing_is_kept_without_a_path(clock: FakeClock) -> None:
    made = sit(None)
    run(made)
    assert len(made.found.chunks) == len(made.trace())


def test_budgets_are_shared_out() -> None:
    made = sit(None)
    assert made.effort(1000.0, 10).seconds == sitting.MOST_S
    assert made.effort(1.15, 10).seconds == pytest.approx(0.1)
    assert made.effort(0.0, 10).seconds == sitting.LEAST_S
    with_groups = Sitting(LLAMA, replace(made.wanted, ranks=64), None)
    most = max(sitting.MOST_RANKS, with_groups.machine.count)
    assert with_groups.group_sizes == [2**i for i in range(1, 6) if 2**i <= most]


def test_transfers_come_first_where_there_is_time(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample((1e-3, 1e-3))

    def measured(sizes: list[int], bench: object, own: int) -> list[object]:
        return [Measurements((Transfer("all_reduce", size, 1, 1024, sample),)) for size in sizes]

    monkeypatch.setattr(sitting, "measure_groups", measured)
    for budget_s, first in ((100.0, True), (25.0, False)):
        made = Sitting(LLAMA, Wanted(tuple(shapes(LLAMA, SEQ)), ranks=2), None)
        told = run(made, budget_s)
        at = told.index("transfers among 2")
        assert (at < told.index("18 chunks of b1 s32")) == first
        assert [t.ranks for t in made.found.transfers] == [2]


ASKED = ["--model", "tiny-llama", "--seq-len", "32", "--micro-batch", "1"]


def test_the_command_measures_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--store", str(tmp_path)]
    assert main([*ASKED, *store, "--dry-run"]) == 0
    assert "shapes: 1, 18 distinct chunks at 19 sites" in capsys.readouterr().out
    assert profiles(tmp_path) == []
    assert main([*ASKED, *store, "--budget", "20s"]) == 0
    assert "written:" in capsys.readouterr().out
    (path,) = profiles(tmp_path)
    assert len(load(path).sites) == len(load(path).by_site)


def test_chunks_take_turns(clock: FakeClock) -> None:
    """All shapes once, then all again: their times are joined, and are all of one pace."""
    made = Sitting(LLAMA, Wanted(tuple(shapes(LLAMA, SEQ, micro_batch=(1, 2)))), None)
    told = [text for text in run(made, 100.0) if "chunks of" in text]
    assert told == ["18 chunks of b1 s32", "18 chunks of b2 s32"] * sitting.TURNS
    times = [each.sample for each in made.found.chunks.values()]
    assert all(each is not None and len(each.times_s) >= 2 * sitting.TURNS for each in times)
    assert made.found.pace_s > 0


def test_a_later_sitting_keeps_the_pace_of_the_first(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    run(sit(path))
    first = load(path).pace_s
    run(sit(path, micro_batch=(1, 2)))
    assert load(path).pace_s == first > 0
