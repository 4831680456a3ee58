"""``piper-search predict``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from search.cli import main

FLAGS = ["predict", "--model", "piper-1b", "--gpus", "8", "--global-batch", "16", "--seq-len", "512", "--pp", "2"]
KEYS = {
    "step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_memory_bytes", "fits", "margin_bytes",
    "bubble_ratio", "exposed_communication_s", "breakdown",
}  # fmt: skip


def predicted(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main([*FLAGS, *more, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, "--zero", "1", "--ep", "2", "--schedule", "zbv")
    assert set(found) >= KEYS
    assert len(found["peak_memory_bytes"]) == 2  # type: ignore[arg-type]
    assert found["fits"] == "yes"
    strategy = found["strategy"]
    assert isinstance(strategy, dict)
    assert (strategy["dp"], strategy["ep"], strategy["virtual_stages"], strategy["zero_stage"]) == (4, 2, 2, 1)
    path = found["critical_path"]
    assert isinstance(path, dict)
    assert sum(path["by_kind_s"].values()) == pytest.approx(path["seconds"])
    assert sum(path["by_row_s"].values()) == pytest.approx(path["seconds"])


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FLAGS) == 0
    text = capsys.readouterr().out
    assert text.startswith("piper-1b on 8 GPUs of p4de, global batch 16, sequence 512\nPP2 DP4, 1f1b, ZeRO-0, 4 micro")
    for part in ("where a step goes", "memory of the fullest row", "critical path of the first step", "fits: "):
        assert part in text
    assert "\x1b" not in text
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", text.split("memory of")[0].split("rows\n")[1])]
    assert sum(shares) == pytest.approx(100.0, abs=0.5)


@pytest.mark.parametrize("name", ["step.html", "step.svg", "step.json"])
def test_pictures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--timeline", str(tmp_path / name)]) == 0
    assert f"written: {tmp_path / name}" in capsys.readouterr().out
    text = (tmp_path / name).read_text()
    assert [each.name for each in tmp_path.iterdir()] == [name]
    if name.endswith(".json"):
        events = json.loads(text)["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        assert any(event.get("name") == "1B2" for event in events)
        return
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # readable without a network
    root = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("1B2 (B), row 1 compute: ") for title in titles) >= 1
    boxes = [float(rect.get("x", "0")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert min(boxes) >= 0
    assert max(boxes) < 1600


def test_a_strategy_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["--model", "piper-1b", "--gpus", "8", "--global-batch", "16", "--seq-len", "512", "--fix", "pp=2", "dp=4",
              "schedule=1f1b", "zero=1", "recompute=none", "--json", "--out", str(tmp_path / "out")]  # fmt: skip
    assert main(search) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    file = best["strategy_file"]
    assert main(["predict", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == best["predicted"]["step_time_s"]
    assert found["peak_memory_bytes"] == best["predicted"]["peak_memory_bytes"]
    assert found["strategy"] is None
    assert main(["predict", file]) == 0
    assert "2 rows of 4 ranks, 2 stages" in capsys.readouterr().out


REFUSED = [
    ("predict", "give a strategy FILE, or --model"),
    ("predict --model lama9b --gpus 8 --global-batch 8", "llama9b"),
    ("predict --model llama9b --gpus 8 --global-batch 8 --cluster p4x", "the nearest ids are p4d, p4de"),
    ("predict --model llama9b --gpus 30 --global-batch 60 --pp 4", "28 or 32 GPUs would do"),
    ("predict --model llama9b --gpus 8 --global-batch 9", "8 or 16 would do"),
    ("predict --model llama9b --gpus nan --global-batch 8", "integer of at least 1"),
    ("predict --model llama9b --gpus 8 --global-batch -8", "integer of at least 1"),
    ("predict --model llama9b --gpus 8 --zero 5", "invalid choice: 5"),
    ("predict --model llama9b --gpus 8 --layers 9,x", "numbers joined by commas"),
    ("predict --model llama9b --gpus 8 --bucket-mib -1", "--bucket-mib"),
    ("predict --model llama9b --gpus 8 --attention flash3", "invalid choice: 'flash3'"),
    ("predict --model llama9b --gpus 8 --global-batch 8 --timeline step.png", "must end in .html, .svg, .json"),
    ("predict --model llama9b --gpus 8 --global-batch 8 --timeline nowhere/step.svg", "no folder that can be written"),
    ("predict nothing.yaml", "nothing.yaml"),
    ("predict nothing.yaml --tp 2", "--tp has no place beside a strategy file"),
    ("--gpus 8 predict --model llama9b", "--gpus is an option of the search"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_refused(
    words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("piper-search: error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_predicting_imports_no_heavy_library() -> None:
    program = (
        f"import sys\nfrom search.cli import main\nmain({FLAGS!r})\n"
        "print([m for m in ('torch', 'ray', 'pydantic', 'networkx', 'numba', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
