"""A profile that was really taken (two cores of a busy AMD EPYC, tiny-llama): it is read, shown and predicted with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_core.arch.presets import preset
from piper_core.names import Phase, Recompute, Region
from profiler.cli import main
from profiler.fit import Chunks, Origin
from profiler.record import Sample
from profiler.spec import load_cluster
from profiler.store import check_model, load, model_digest
from search.direct.score import Direct
from search.engine import search
from search.predict import predict
from search.problem import Problem
from search.profiled import by_profile, use_profile
from search.request import Request
from search.space import Space

FILE = Path(__file__).parent / "data" / "tiny-llama.profile.json"
LLAMA, CPU = preset("tiny-llama"), load_cluster("cpu")
TAKEN = load(FILE)


def test_it_says_what_it_is_of() -> None:
    check_model(TAKEN, LLAMA.name, model_digest(LLAMA), "the file")
    assert (TAKEN.machine.kind, TAKEN.machine.count, TAKEN.machine.threads) == ("cpu", 2, 1)
    assert "EPYC" in TAKEN.machine.device
    assert TAKEN.conditions[0].when.startswith("2026-12-01")


def test_all_phases_were_measured() -> None:
    for region in (Region.ATTENTION, Region.MLP):
        phases = {(site.phase, site.policy) for site in TAKEN.by_site if site.region is region}
        assert phases >= {(p, Recompute.NONE) for p in (Phase.F, Phase.B, Phase.BI, Phase.BW)}
        assert (Phase.R, Recompute.FULL) in phases
    assert {t.kind for t in TAKEN.transfers} >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}


def test_the_backward_is_about_its_two_parts() -> None:
    """DESIGN says within 2 %; on a busy CPU, where caches differ, within 35 %."""
    found = {(s.region, s.phase): t.sample for s, t in TAKEN.by_site.items() if s.micro_batch == 2 and
             s.degrees.whole and s.policy is Recompute.NONE}  # fmt: skip
    for region in (Region.ATTENTION, Region.MLP, Region.HEAD):
        whole, *parts = (found[region, phase] for phase in (Phase.B, Phase.BI, Phase.BW))
        assert whole is not None
        assert sum(part.median_s for part in parts if part is not None) == pytest.approx(whole.median_s, rel=0.35)


def test_other_sizes_are_fitted_from_it() -> None:
    (site,) = [s for s in TAKEN.by_site if str(s) == "mlp F b1 s128"]
    found = Chunks(TAKEN)(replace(site, micro_batch=4), lambda each: 1e-3 * each.micro_batch)
    assert found is not None
    assert found.origin is Origin.FITTED
    assert found.seconds > TAKEN.by_site[site].sample.median_s  # type: ignore[union-attr]  # measured


@pytest.mark.parametrize("options", [{"pp": 1}, {"pp": 2}, {"dp": 2, "zero": 1}, {"tp": 2}])
def test_strategies_are_priced_by_measurements_alone(options: dict[str, int]) -> None:
    guess = predict(Request(LLAMA, CPU, seq_len=128, micro_batch=1, num_microbatches=4, **options))  # type: ignore[arg-type]
    found = by_profile(guess, TAKEN, LLAMA, CPU)
    assert set(found.cost.to_data()["chunks"]) == {"measured"}
    assert set(found.cost.to_data()["transfers"]) <= {"measured"}
    assert found.low_s <= found.found.score.step_time_s <= found.high_s


def test_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(FILE)]) == 0
    assert "attention BI b1 s128" in capsys.readouterr().out


def test_a_search_prices_with_it() -> None:
    problem = Problem(LLAMA, CPU, 2, 4, 128)
    by_preset = Problem(LLAMA, CPU, 2, 4, 128)
    cost = use_profile(problem, TAKEN)
    space = Space(LLAMA, 2, CPU.gpus_per_node, 4, 128, {"pp": ("1", "2"), "tp": ("1", "2"), "zero": ("0",)}, {})
    result = search(problem, space, top=3, budget_s=30.0, workers=1, tune=False)
    assert result.stopped == "proved"
    for each in result.candidates[:3]:
        assert problem.bounds.time_bound(each.config) <= each.score.step_time_s * (1 + 1e-9)
        assert each.score.step_time_s == pytest.approx(problem.score(each.config).step_time_s)
        preset_s = by_preset.score(each.config).breakdown["compute"]
        assert each.score.breakdown["compute"] != pytest.approx(preset_s, rel=1e-5)
    assert cost.origins["chunks"][Origin.MEASURED] > 0


@pytest.mark.parametrize(
    "options", [{"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"dp": 2, "zero": 3}, {"tp": 2}]
)
def test_the_direct_way_prices_with_it_alike(options: dict[str, Any]) -> None:
    """What starting messages takes of the thread that computes is in both, and what ranks lose at collectives."""
    problem = Problem(LLAMA, CPU, 2, 4, 128)
    use_profile(problem, TAKEN)
    config = Request(LLAMA, CPU, seq_len=128, micro_batch=1, global_batch=4, **options).resolve()
    direct = Direct(LLAMA, problem.model, CPU, problem.cost, problem.bounds)
    assert problem.cost.host_s > 0
    assert problem.cost.meeting_s > 0
    assert direct.covers(config)
    assert direct.score(config).step_time_s == pytest.approx(problem.score(config).step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"pp": 1}, {"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2},
     {"tp": 2, "sequence_parallel": True}],
)  # fmt: skip
def test_the_preset_of_a_host_is_about_what_one_measured(options: dict[str, Any]) -> None:
    """Some numbers of the record ``cpu`` come from this very profile: steps by either are within 40 % of each other,
    of ZeRO-3 within 60 %: the preset does not say what ranks lose at many collectives."""
    guess = predict(Request(LLAMA, CPU, seq_len=128, micro_batch=1, num_microbatches=4, **options))
    by = by_profile(guess, TAKEN, LLAMA, CPU).found.score.step_time_s / guess.score.step_time_s
    most = 1.6 if options.get("zero") else 1.4
    assert 1 / most < by < most


@pytest.mark.parametrize("gpus", [2, 4])
def test_bounds_hold_whatever_was_measured(gpus: int) -> None:
    """No sequence need take least time in the largest microbatch: a chunk that is slow in large ones."""
    slow = {site: each for site, each in TAKEN.sites.items() if site.micro_batch == 2}
    chunks = dict(TAKEN.chunks)
    for digest in slow.values():
        sample = chunks[digest].sample
        assert sample is not None
        chunks[digest] = replace(chunks[digest], sample=Sample(tuple(3 * t for t in sample.times_s)))
    problem = Problem(LLAMA, CPU, gpus, 8, 128)
    use_profile(problem, replace(TAKEN, chunks=chunks))
    for b in (1, 2, 4):
        config = Request(LLAMA, CPU, seq_len=128, gpus=gpus, dp=1, pp=gpus, micro_batch=b, global_batch=8).resolve()
        seconds = problem.score(config).step_time_s
        part = replace(config, micro_batch=8, num_microbatches=1)
        assert problem.bounds.degrees(part)[0] <= seconds * (1 + 1e-9)
        assert problem.bounds.time_bound(config) <= seconds * (1 + 1e-9)
