"""The whole loop in one command: measure the machine, search by that, race the best, keep their times, learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piper_core.program.strategy import load
from profiler.store import load as load_profile
from tests.ray.test_run_command import CONFIG

COMMAND = [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())"]
pytestmark = pytest.mark.slow


def command(folder: Path, *words: object) -> str:
    done = subprocess.run(
        [*COMMAND, *map(str, words)], cwd=folder, env=os.environ | {"PIPER_PROFILES": str(folder / "store")},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_profile_to_a_winner_by_measurement(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ["--model", config, "--gpus", 2, "--cluster", "cpu", "--global-batch", 4, "--seq-len", 32, "--budget", 4,
             "--fix", "recompute=none", "cp=1"]  # fmt: skip
    first: dict[str, Any] = json.loads(
        command(tmp_path, *words, "--profile", "auto", "--execute", 2, "--json", "--out", "a")
    )
    path = Path(first["priced_by"]["profile"])
    assert path.is_relative_to(tmp_path / "store")
    assert "measured" in first["priced_by"]["origins"]["chunks"]
    execution = first["execution"]
    assert execution["mode"] == "real"
    assert [each["candidate"] for each in execution["measured"]] == [0, 1]
    assert all(each["step_time_s"] > 0 and len(each["rounds_s"]) >= 4 for each in execution["measured"])
    assert first["best"]["id"] == execution["winner"]
    assert first["best"]["measured"] == first["candidates"][execution["winner"]]["measured"]
    header = load(tmp_path / "a" / "best.strategy.yaml").header
    assert header.measured["mode"] == "real"
    assert header.predicted["profile"] == str(path)
    runs = load_profile(path).runs
    assert len(runs) == (2 if execution["kept_in"] else 0)
    assert execution["kept_in"] or "other programs took" in execution["not_kept"]

    ran = command(tmp_path, "run", tmp_path / "a" / "best.strategy.yaml", "--steps", 5)
    assert "measured / predicted" in ran
    known = len(load_profile(path).runs)
    assert known - len(runs) == ("kept: " in ran)
    second: dict[str, Any] = json.loads(command(tmp_path, *words, "--execute", 0, "--json", "--out", "b"))
    assert second["priced_by"]["profile"] == str(path)
    assert second["priced_by"]["runs"] == known
    assert second["best"]["measured"] is None
    told = json.loads(command(tmp_path, "history", "--json"))
    assert [len(each["rows"]) for each in told] == ([known] if known else [])


def test_too_few_devices_are_a_rehearsal(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ["--model", config, "--gpus", 8, "--global-batch", 8, "--seq-len", 32, "--budget", 3, "--fix", "pp=2"]
    data: dict[str, Any] = json.loads(command(tmp_path, *words, "--json"))
    execution = data["execution"]
    assert execution["mode"] == "rehearsal"
    assert execution["why"] == "8 ranks have too few cuda devices here"
    assert execution["measured"] == []
    assert data["best"]["measured"] is None
    assert execution["rehearsal"]["error"] < 1e-8
    said = command(tmp_path, *words, "--out", "b")
    assert "executed: row 1, in a rehearsal, not a run at size" in said
    assert said.rstrip().endswith("no step time was measured: 8 ranks have too few cuda devices here")
    assert load(tmp_path / "b" / "best.strategy.yaml").header.measured["mode"] == "rehearsal"
