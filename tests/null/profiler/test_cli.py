"""``piper-profile`` and ``--profile``: light, plain, and every wrong input one line with exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from piper_core.errors import ConfigError
from profiler import take
from profiler.cli import main
from profiler.fingerprint import machine
from profiler.store import model_digest, place, save
from search.cli import main as search
from search.profiled import threads_of
from tests.null.profiler.made import LLAMA, bare, profile, run

PREDICT = ["predict", "--model", "tiny-llama", "--cluster", "cpu", "--seq-len", "128", "--num-microbatches", "4"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.profile.json"
    save(profile(), made)
    return made


def test_show_prints_every_measurement(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert all(f"{site} " in text for site in profile().sites)
    assert "compute and transfer at once: 1.50" in text
    assert main(["show", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == len(profile().sites)


def test_compare_says_what_differs(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "b.profile.json"
    save(profile(scale=1.5), other)
    assert main(["compare", str(path), str(other)]) == 0
    text = capsys.readouterr().out
    assert "geometric mean of B / A: 1.500" in text
    assert "like machines" in text
    assert main(["compare", str(path), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["geometric_mean"] == pytest.approx(1)


def test_a_store_is_listed_imported_to_and_exported_from(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "store"
    assert main(["show", "--store", str(folder)]) == 2
    assert f"--store {folder} is not there; name a folder of profiles" in capsys.readouterr().err
    assert main(["show", "--store", str(path)]) == 2
    assert "is a file; piper-profile show FILE shows one" in capsys.readouterr().err
    folder.mkdir()
    assert main(["show", "--store", str(folder)]) == 0
    assert "no profile in" in capsys.readouterr().out
    assert main(["import", str(path), "--store", str(folder)]) == 0
    kept = Path(capsys.readouterr().out.strip().removeprefix("imported: "))
    assert kept.is_relative_to(folder)
    assert main(["show", "--store", str(folder)]) == 0
    assert "tiny-llama" in capsys.readouterr().out
    assert main(["export", str(kept), str(tmp_path / "c.profile.json")]) == 0
    assert (tmp_path / "c.profile.json").read_bytes() == path.read_bytes()
    assert main(["export", str(kept), str(path)]) == 2, "an export writes over nothing"


def test_predict_by_a_profile(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search([*PREDICT, "--profile", str(path)]) == 0
    assert "costs: chunks 8 measured" in capsys.readouterr().out
    assert search([*PREDICT, "--profile", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["profile"]["origins"]["chunks"] == {"measured": 8}
    assert data["profile"]["low_s"] < data["step_time_s"] < data["profile"]["high_s"]


def test_the_stores_own_profile_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path))
    two = [*PREDICT, "--dp", "2"]
    assert search(two) == 0
    assert "costs:" not in capsys.readouterr().out
    here = machine("cpu", threads_of(2))
    save(profile(machine=here), place(here, LLAMA.name, model_digest(LLAMA), "float32"))
    assert search(two) == 0
    assert "costs: chunks 8 measured" in capsys.readouterr().out
    monkeypatch.setattr(take, "measured", None)  # nothing is to be measured
    assert search([*two, "--profile", "auto"]) == 0
    assert "costs: chunks 8 measured" in capsys.readouterr().out
    assert search([*two, "--profile", "none"]) == 0
    assert "costs:" not in capsys.readouterr().out
    for ranks in (1, 4):
        assert search([*PREDICT, "--dp", str(ranks)]) == 0
        found = "costs: chunks 8 measured" in capsys.readouterr().out
        assert found == (threads_of(ranks) == threads_of(2)), "as many threads a rank as cores allow"


@pytest.mark.parametrize(("device", "kind"), [("AMD EPYC 25.1.1", "cpu"), ("NVIDIA H100 80GB HBM3", "cuda")])
def test_a_profile_of_another_device_is_refused(
    device: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "other.profile.json"
    save(profile(machine=replace(profile().machine, kind=kind, device=device)), where)
    asked = [
        "--model",
        "tiny-llama",
        "--seq-len",
        "128",
        "--global-batch",
        "8",
        "--cluster",
        "p4de",
        "--profile",
        str(where),
    ]
    for words in (["predict", *asked], ["--gpus", "8", *asked]):
        assert search(words) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"is of {device}, and cluster p4de is of A100-SXM-80GB" in line
        assert "--profile none" in line


def test_a_profile_of_the_clusters_device_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "a100.profile.json"
    save(profile(machine=replace(profile().machine, kind="cuda", device="NVIDIA A100-SXM4-80GB")), where)
    asked = [
        "predict",
        "--model",
        "tiny-llama",
        "--seq-len",
        "128",
        "--global-batch",
        "8",
        "--cluster",
        "p4de",
        "--profile",
        str(where),
    ]
    assert search(asked) == 0
    assert "costs: chunks 8 measured" in capsys.readouterr().out


def test_predict_takes_a_profile_where_auto_finds_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []

    def measured(architecture: object, device: str, *, seq_len: int, ranks: int, **_: object) -> Path:
        taken.append((seq_len, ranks))
        save(profile(), tmp_path / "new.profile.json")
        return tmp_path / "new.profile.json"

    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path))
    monkeypatch.setattr(take, "measured", measured)
    assert search([*PREDICT, "--dp", "2", "--profile", "auto"]) == 0
    assert "costs: chunks 8 measured" in capsys.readouterr().out
    assert taken == [(128, 2)]
    other = ["predict", "--model", "tiny-llama", "--seq-len", "128", "--num-microbatches", "4", "--profile", "auto"]
    assert search(other) == 2
    assert "--profile auto measures this machine's CPU, not p4de" in capsys.readouterr().err


def test_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store"
    made = profile().merged(bare(runs=(run("pp2 1f1b", 1.1, 1.0, 1, bubble=0.2), run("dp2", 1.0, 1.0, 2))))
    save(made, folder / "m" / "x.profile.json")
    assert search(["history", "--store", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "pp2 1f1b" in text
    assert "-9.1%" in text
    assert search(["history", "--store", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["rows"]) == 2
    (tmp_path / "empty").mkdir()
    assert search(["history", "--store", str(tmp_path / "empty")]) == 0
    assert "no measured run" in capsys.readouterr().out
    assert search(["history", "--store", str(tmp_path / "none")]) == 2
    assert f"--store {tmp_path / 'none'}: no such folder" in capsys.readouterr().err


def test_one_bad_file_of_a_store_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = (tmp_path / "m" / f"{name}.profile.json" for name in ("a", "b"))
    save(profile().merged(bare(runs=(run("dp2", 1.0, 1.0),))), good)
    bad.write_text("{")
    for command, name in ((search, "history"), (main, "show")):
        assert command([name, "--store", str(tmp_path)]) == 0
        told = capsys.readouterr()
        assert "tiny-llama" in told.out
        assert told.err.count("\n") == 1
        assert f"warning: left out: profile {bad}: not whole JSON" in told.err
    assert search(["history", str(bad)]) == 2, "one that was named is refused"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model is missing"),
        (["--model", "nothing"], "unknown model"),
        (["--model", "tiny-llama", "--device", "tpu"], "invalid choice"),
        (["--model", "tiny-llama", "--tp", "0"], "numbers of at least 1"),
        (["--model", "tiny-llama", "--tp", "x"], "numbers of at least 1"),
        (["--model", "tiny-llama", "--budget", "0"], "positive number of seconds"),
        (["--model", "tiny-llama", "--budget", "0.001"], "--budget 0.001 s is too small to measure anything: 1 s at"),
        (["--model", "tiny-llama", "--seq-len", "99999"], "longer than tiny-llama allows"),
        (["show", "no.profile.json"], "No such file"),
        (["import", "no.profile.json"], "No such file"),
        (["compare", "a", "b"], "No such file"),
        (["--tp", "2", "show"], "--tp is an option of measuring, not of show"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("piper-profile: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("kept", ["folder", "x.profile.json"])
def test_a_store_that_cannot_be_written_is_refused_before_measuring(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(take, "_sitting", never)
    (tmp_path / "file").write_text("")
    assert main(["--model", "tiny-llama", "--store", str(tmp_path / "file" / kept)]) == 2
    error = capsys.readouterr().err
    assert "cannot be written: a file is where its folder would be; name a folder that can, by PIPER_PROFILES" in error
    assert error.count("\n") == 1
    monkeypatch.setenv("PIPER_PROFILES", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be written"):
        take.measured(LLAMA, "cpu", seq_len=64, ranks=1, micro_batch=(1,), threads=1, budget_s=9, hidden=True)


def test_a_dry_run_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise InterruptedError  # what would be measured is asked for

    monkeypatch.setattr(take, "_sitting", stop)
    monkeypatch.setenv("PIPER_TRACEBACK", "1")
    with pytest.raises(InterruptedError):
        main(["--model", "tiny-llama", "--store", str(tmp_path / "new"), "--dry-run"])
    assert not (tmp_path / "new").exists()


def test_no_such_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    assert main(["--model", "tiny-llama", "--device", "cuda"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_a_profile_of_another_model(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(["predict", "--model", "tiny-moe", *PREDICT[3:], "--profile", str(path)]) == 2
    assert "of model tiny-llama, not of tiny-moe" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["clusters"], ["show"]])
def test_torch_is_left_alone(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import contextlib, sys\nfrom profiler.cli import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({arguments!r})\n"
        "assert not {'torch', 'ray', 'pydantic', 'networkx', 'numpy'} & set(sys.modules)"
    )
    environment = {"PIPER_PROFILES": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
