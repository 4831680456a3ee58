"""Real processes: transfers and steps are measured; what goes wrong in a rank is one error and leaves nobody."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace

import pytest
import torch

from piper_core.arch.presets import preset
from piper_core.errors import ConfigError, PiperError
from profiler.measure import transfers
from profiler.measure.bench import Bench
from profiler.measure.clock import CudaClock, Timing
from profiler.measure.processes import on_processes
from profiler.measure.quiet import before_others, check_priority, waited_s
from profiler.measure.steps import Trial, measure_steps
from profiler.measure.transfers import measure_groups, measure_transfers
from profiler.spec import load_cluster
from search.predict import predict
from search.request import Request
from tests.torch_cpu.profiler.fake import raise_on

LLAMA = replace(preset("tiny-llama"), layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConfigError("ours"), ConfigError, "^ours$"),
        (ValueError("theirs"), PiperError, "rank 1 of 2 failed: ValueError: theirs"),
        (None, PiperError, "rank 1 of 2 died"),
    ],
)
def test_a_rank_that_fails_ends_it_for_all(error: Exception | None, kind: type[Exception], words: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(kind, match=words):
        on_processes(raise_on, 2, 1, error, timeout_s=60.0)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_transfers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SIZES", (1024, 65536))
    found = measure_transfers(2, Bench(seconds=0.02))
    kinds = {(t.kind, t.bytes) for t in found.transfers}
    assert kinds == {(kind, size) for kind in transfers.KINDS for size in (1024, 65536)}
    assert all(0 < t.sample.median_s < 10 for t in found.transfers)
    assert [o.what for o in found.overlaps] == [transfers.COMPUTE_AND_COMPUTE, transfers.COMPUTE_AND_TRANSFER]
    assert found.host is not None
    assert 0 < found.host.median_s < 1
    assert len(found.meetings) == len(transfers.MEETINGS)
    assert [m.compute_s for m in found.meetings] == sorted(m.compute_s for m in found.meetings)
    assert all(factor >= 1 for m in found.meetings for factor in m.factors.times_s)


@pytest.mark.slow
def test_groups_larger_than_the_cores_are_forks_too() -> None:
    two, three = measure_groups((2, 3), Bench(seconds=0.001), own=2)
    assert {t.ranks for t in two.transfers} == {2}
    assert {t.ranks for t in three.transfers} == {3}
    assert two.overlaps
    assert (three.overlaps, three.host, three.meetings) == ((), None, ()), (
        "ranks that share cores say nothing of how two computing ones do"
    )


@pytest.mark.slow
def test_steps_of_strategies_take_turns() -> None:
    cluster, trials = load_cluster("cpu"), []
    for options in ({"pp": 1}, {"pp": 2}, {"dp": 2, "zero": 3}):
        asked = Request(LLAMA, cluster, seq_len=32, micro_batch=1, num_microbatches=2, **options)  # type: ignore[arg-type]
        trials.append(Trial(str(options), predict(asked).compiled, 1, 32))
    found = measure_steps(LLAMA, trials, 3)
    assert [len(bursts) for bursts in found] == [3, 3, 3]
    assert all(burst.seconds > 0 for bursts in found for burst in bursts)


def test_cuda_events_are_read_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA clock with events made up: it was not run on a CUDA device."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("synchronize")

        def elapsed_time(self, other: Event) -> float:
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert CudaClock().time(lambda: told.append("call"), 2) == Timing(0.012, 0.012)
    assert told == ["record", "call", "call", "record", "synchronize"]


def test_priority_that_is_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(ConfigError, match="needs root"):
        check_priority()
    with before_others(False):
        assert waited_s() >= 0
