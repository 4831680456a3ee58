"""The main search with a profile: what it prices by, what it says of that, and what measured runs change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_core.arch.presets import preset
from piper_core.program.strategy import load
from profiler.fingerprint import Machine, machine
from profiler.record import Profile, Run, Sample
from profiler.spec import load_cluster
from profiler.store import load as load_profile
from profiler.store import model_digest, place, save
from search.calibrate import Calibration, recalibrate, stretched
from search.cli import main
from search.cli.choose_profile import choose_profile
from search.engine import search
from search.history import digest_of, history, remember, short
from search.pricing import Pricing
from search.problem import Problem
from search.profiled import local_profile, use_profile
from search.space import Space

FILE = Path(__file__).parents[1] / "profiler" / "data" / "tiny-llama.profile.json"
LLAMA, CPU, TAKEN = preset("tiny-llama"), load_cluster("cpu"), load_profile(FILE)
SMALL = ["--model", "tiny-llama", "--gpus", "2", "--cluster", "cpu", "--global-batch", "4", "--execute", "0",
         "--fix", "zero=0,1", "recompute=none", "cp=1"]  # fmt: skip


def found(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    """Return the JSON of a search."""
    assert main([*SMALL, "--json", *map(str, options)]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def text(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert main([*SMALL, *map(str, options)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert main([*SMALL, *map(str, options)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def runs_with(exposed: float, bubble: float, count: int = 8) -> tuple[Run, ...]:
    """Runs of which each took longer by a share of its exposed communication and its bubble."""
    made = []
    for i in range(count):
        shares = {"exposed": 0.1 * (i % 3), "bubble": 0.1 * (i % 4)}
        factor = 1 + exposed * shares["exposed"] + bubble * shares["bubble"]
        when = f"2026-11-30T12:00:{i:02}+00:00"
        made.append(Run(f"s{i}", str(i), when, Sample((factor, factor, factor)), 1.0, shares))
    return tuple(made)


@pytest.fixture
def learnt(tmp_path: Path) -> Path:
    """The taken profile with runs in which bubbles cost much more than predicted."""
    path = tmp_path / "learnt.profile.json"
    save(replace(TAKEN, runs=runs_with(0.0, 6.0)), path)
    return path


def test_the_search_is_by_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "--profile", FILE, "--out", tmp_path / "out")
    by = data["priced_by"]
    assert by["profile"] == str(FILE)
    assert by["runs"] == 0
    assert set(by["origins"]["chunks"]) <= {"measured", "fitted"}
    assert by["low_s"] < data["best"]["predicted"]["step_time_s"] < by["high_s"]
    assert data["best"]["recalibrated"] is None
    strategy = load(tmp_path / "out" / "best.strategy.yaml")
    assert strategy.header.predicted["by"] == f"a profile of {TAKEN.machine}"
    again = Pricing.of(FILE).predict(strategy).score.step_time_s
    assert strategy.header.predicted["step_time_s"] == pytest.approx(again, rel=1e-6)
    assert main(["check", str(tmp_path / "out" / "best.strategy.yaml")]) == 0
    said = capsys.readouterr().out
    assert f"by a profile of {TAKEN.machine}" in said
    assert "step time: the same" in said


def test_processes_price_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        found(capsys, "--profile", FILE, "--workers", n, "--out", tmp_path / str(n))["candidates"] for n in (1, 2)
    )
    assert [each["predicted"] for each in one] == [each["predicted"] for each in two]


def test_the_text_says_by_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = text(capsys, "--profile", FILE, "--out", tmp_path / "a")
    assert f"priced by a profile of {TAKEN.machine}; of row 1, costs: chunks" in said
    assert "another host" not in said
    said = text(capsys, "--profile", "none", "--out", tmp_path / "b")
    assert "costs of cpu without a profile are those of another host" in said
    assert "piper-profile --model tiny-llama --seq-len 128 --ranks 2" in said


def test_the_machines_own_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path))
    assert found(capsys, "--out", tmp_path / "a")["priced_by"] is None
    here = machine("cpu", max(1, machine("cpu").count // 2))
    path = place(here, LLAMA.name, model_digest(LLAMA), "float32")
    save(replace(TAKEN, machine=here), path)
    assert found(capsys, "--out", tmp_path / "b")["priced_by"]["profile"] == str(path)
    assert found(capsys, "--profile", "auto", "--out", tmp_path / "c")["priced_by"]["profile"] == str(path)
    assert found(capsys, "--profile", "none", "--out", tmp_path / "d")["priced_by"] is None


@pytest.mark.parametrize(
    ("device", "bytes_", "cluster"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "p4de"), ("NVIDIA A100-SXM4-40GB", 40960, "p4d"),
        ("NVIDIA H100 80GB HBM3", 81559, "p5"), ("NVIDIA A100 80GB PCIe", 81920, None), ("NVIDIA L4", 23034, None),
    ],
)  # fmt: skip
def test_a_cluster_of_this_machines_gpus(
    device: str, bytes_: int, cluster: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which records are of the GPUs here, told with GPUs that are made up."""
    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path))
    here = Machine("cuda", device, 8, bytes_ << 20, "550", "2.13", "NCCL 2", 1)
    monkeypatch.setattr("search.profiled.machine", lambda kind, threads=1: here)
    path = place(here, LLAMA.name, model_digest(LLAMA), "bfloat16")
    save(Profile(here, LLAMA.name, model_digest(LLAMA), "bfloat16"), path)
    own = [name for name in ("p4d", "p4de", "p5") if local_profile(LLAMA, load_cluster(name)) == path]
    assert own == ([cluster] if cluster else [])


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", tmp_path / "out"]
    assert "No such file" in refused(capsys, "--profile", tmp_path / "nothing.json", *out)
    assert "of model tiny-llama, not of tiny-moe" in refused(capsys, "--model", "tiny-moe", "--profile", FILE, *out)
    assert "--profile auto measures this machine's CPU, not p4de" in refused(
        capsys, "--cluster", "p4de", "--seq-len", "512", "--profile", "auto", *out
    )
    assert list(tmp_path.iterdir()) == []


def test_auto_measures_what_its_own_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length of sequences is measured; the measuring itself is made up."""
    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path))
    here = machine("cpu", max(1, machine("cpu").count // 2))
    path = place(here, LLAMA.name, model_digest(LLAMA), "float32")
    save(replace(TAKEN, machine=here), path)
    asked: list[tuple[int, tuple[int, ...]]] = []

    def measured(architecture: object, device: str, *, seq_len: int, micro_batch: tuple[int, ...], **_: object) -> Path:
        asked.append((seq_len, micro_batch))
        return path

    monkeypatch.setattr("profiler.take.measured", measured)
    for length, batch in ((128, 16), (64, 16), (64, 2)):
        found = choose_profile("auto", LLAMA, CPU, 2, (batch, length), hidden=True)
        assert found is not None
        assert found.path == path
    assert asked == [(64, (1, 4, 16)), (64, (1, 2))]
    assert choose_profile(None, LLAMA, CPU, 2, (16, 64), hidden=True) is not None
    assert len(asked) == 2, "only auto measures"


def test_a_search_goes_on_with_the_same_costs_only(
    tmp_path: Path, learnt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    first = found(capsys, "--profile", FILE, "--out", folder)
    assert "holds another search" in refused(capsys, "--resume", folder, "--profile", "none")
    assert first["best"]["id"] == found(capsys, "--resume", folder, "--profile", FILE)["best"]["id"]


def test_runs_rank_anew(tmp_path: Path, learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = found(capsys, "--profile", FILE, "--out", tmp_path / "a")
    data = found(capsys, "--profile", learnt, "--out", tmp_path / "b")
    times = [each["predicted"]["step_time_s"] for each in data["candidates"]]
    assert times == sorted(times)
    assert data["priced_by"]["runs"] == 8
    assert data["proved"] == 0
    for each in data["candidates"]:
        told = each["recalibrated"]
        assert told["low_s"] < each["predicted"]["step_time_s"] < told["high_s"]
        assert sum(each["predicted"]["breakdown"].values()) == pytest.approx(told["step_time_s"])
    assert times[0] > before["best"]["predicted"]["step_time_s"]
    header = load(tmp_path / "b" / "best.strategy.yaml").header.predicted
    assert header["low_s"] < header["step_time_s"] < header["high_s"]
    said = text(capsys, "--profile", learnt, "--out", tmp_path / "c")
    assert "step times are recalibrated by 8 measured runs" in said
    assert "bounds, proof gap and what was ruled out are by the profile's costs" in said


def test_recalibration_changes_who_is_first() -> None:
    """Where bubbles cost much more than predicted, what has none wins though its costs say otherwise."""
    problem = Problem(LLAMA, CPU, 2, 4, 128)
    use_profile(problem, TAKEN)
    fix = {"zero": ("0",), "recompute": ("none",), "cp": ("1",), "order": ("family",)}
    space = Space(LLAMA, 2, CPU.gpus_per_node, 4, 128, {k: v for k, v in fix.items() if k != "order"}, {})
    result = search(problem, space, top=40, budget_s=60.0, workers=1, tune=False)
    raw = {each.config: each.score for each in result.candidates}
    calibration = Calibration.of(replace(TAKEN, runs=runs_with(0.0, 40.0, 30)))
    assert calibration is not None
    ranked = recalibrate(result, calibration)
    for each, (seconds, low, high) in zip(result.candidates, ranked.intervals, strict=True):
        assert each.score == stretched(raw[each.config], seconds / raw[each.config].step_time_s)
        assert low < seconds < high
    keys = [each.score.step_time_s for each in result.candidates]
    assert keys == sorted(keys)
    assert [each.config for each in result.candidates] != sorted(raw, key=lambda c: raw[c].step_time_s)
    first = result.best.score
    assert first.bubble_ratio <= min(raw.values(), key=lambda each: each.step_time_s).bubble_ratio


def test_a_measured_step_is_remembered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.profile.json"
    save(TAKEN, path)
    found(capsys, "--profile", path, "--fix", "pp=2", "schedule=1f1b", "--out", tmp_path / "out")
    strategy = load(tmp_path / "out" / "best.strategy.yaml")
    predicted = strategy.header.predicted["step_time_s"]
    remember(strategy, path, Sample((1.3 * predicted, 1.31 * predicted, 1.29 * predicted)))
    (row,) = history(path, load_profile(path)).rows
    assert row.error == pytest.approx(1 / 1.3 - 1, rel=0.01)
    assert row.strategy == short(strategy)
    assert "pp2" in row.strategy
    assert load_profile(path).runs[0].digest == digest_of(strategy.program)
    after = Pricing.of(path).predict(strategy).score.step_time_s
    assert predicted < after < 1.31 * predicted, "one run moves predictions part of the way"
    assert main(["check", str(tmp_path / "out" / "best.strategy.yaml")]) == 0
    assert "step time: the same" in capsys.readouterr().out, "a file is checked by the runs that it knew of"


def test_a_profile_that_is_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.profile.json"
    save(TAKEN, path)
    found(capsys, "--profile", path, "--out", tmp_path / "out")
    path.unlink()
    assert main(["check", str(tmp_path / "out" / "best.strategy.yaml")]) == 0
    out = capsys.readouterr().out
    assert "not by what the header names: profile" in out
    assert "against what the header says" not in out
    assert main(["report", str(tmp_path / "out")]) == 2
    assert "No such file" in capsys.readouterr().err
