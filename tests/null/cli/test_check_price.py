"""``check`` prices what it verifies, says what changed by cause, and looks again on every save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper_core.program.strategy import Strategy, dump
from search.candidate import Score
from search.cli import main
from search.compare import Change, Price
from search.predict import predict_strategy
from tests.null.export.strategies import data_parallel, pipeline


def strategy(**header: Any) -> Strategy:
    more = [data_parallel(shard_grads=True, bucket_size=100)]
    return pipeline("zbv", 2, 4, 2, row=2, more=more, **header)


def recorded() -> Strategy:
    """The strategy with its own prediction in the header, as a search writes it."""
    score = predict_strategy(strategy()).score
    price = Price.of(score)
    return strategy(predicted={
        "step_time_s": float(f"{score.step_time_s:.8g}"),
        "peak_memory_bytes": [round(n) for n in score.peak_memory_bytes],
        "breakdown_s": dict(price.time_s), "memory_bytes": dict(price.memory),
    })  # fmt: skip


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["check", *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert main(["check", *words]) == 0
    return data, capsys.readouterr().out


def test_the_price_is_that_of_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(strategy(), tmp_path / "a.yaml")
    data, text = check(capsys, str(tmp_path / "a.yaml"))
    found = predict_strategy(strategy()).score
    assert Score.from_data(data["predicted"]) == found
    assert (data["not_priced"], data["changes"]) == (None, None)
    assert f"predicted on p4de: {found.step_time_s:.4g} s a step" in text
    assert "the fullest: fits" in text


def test_unchanged_against_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(recorded(), tmp_path / "a.yaml")
    data, text = check(capsys, str(tmp_path / "a.yaml"))
    assert "step time: the same" in text
    assert "(row 0): the same" in text
    assert abs(data["changes"]["step_time_s"]) < 1e-6


def test_an_edit_is_priced_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(recorded(), tmp_path / "a.yaml")
    text = (tmp_path / "a.yaml").read_text()
    edited = text.replace("shard_grads: true", "shard_grads: true, shard_params: true")
    assert edited != text
    (tmp_path / "b.yaml").write_text(edited)
    data, shown = check(capsys, str(tmp_path / "b.yaml"))
    against, _ = check(capsys, str(tmp_path / "b.yaml"), "--against", str(tmp_path / "a.yaml"))
    changes = data["changes"]
    assert changes["memory_bytes"] == pytest.approx(against["changes"]["memory_bytes"], rel=1e-6)
    assert changes["memory_causes_bytes"]["parameters"] < 0
    assert changes["step_time_s"] == pytest.approx(against["changes"]["step_time_s"], abs=1e-5)
    assert sum(changes["time_causes_s"].values()) == pytest.approx(changes["step_time_s"], abs=1e-5)
    assert sum(changes["memory_causes_bytes"].values()) == pytest.approx(changes["memory_bytes"], abs=2)
    assert "against what the header says" in shown
    assert " parameters" in shown


def test_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    dump(strategy(cluster=None), path)
    data, text = check(capsys, str(path))
    assert data["verified"]
    assert data["predicted"] is None
    assert data["not_priced"] == "the header names no cluster"
    assert "not priced: the header names no cluster (--cluster p4de)" in text
    data, _ = check(capsys, str(path), "--cluster", "p4d")
    assert data["predicted"]["step_time_s"] > 0
    assert main(["check", str(path), "--against", str(path)]) == 2
    assert "--against needs a price" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"cluster": "p4x"}, "header field cluster: "),
        ({"cluster": "missing.json"}, "header field cluster: "),
        ({"schedule": "1f1bb"}, "header field schedule: no schedule family '1f1bb'; did you mean 1f1b"),
    ],
)
def test_names_in_the_header(
    header: dict[str, str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(strategy(**header), tmp_path / "a.yaml")
    assert main(["check", str(tmp_path / "a.yaml")]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1


def test_an_order_by_hand_may_say_so(tmp_path: Path) -> None:
    dump(strategy(schedule="custom"), tmp_path / "a.yaml")
    assert main(["check", str(tmp_path / "a.yaml")]) == 0


def test_what_a_person_wrote_as_a_prediction_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for predicted in ({"step_time_s": "fast"}, {"step_time_s": 1.0, "peak_memory_bytes": []}, {"step_time_s": True}):
        dump(strategy(predicted=predicted), tmp_path / "a.yaml")
        data, _ = check(capsys, str(tmp_path / "a.yaml"))
        assert data["changes"] is None


def test_words_of_a_change() -> None:
    before = Price(2.0, {"compute": 1.5, "waiting": 0.5}, 2.0 * 2**30, {"parameters": 2.0 * 2**30})
    after = Price(2.1, {"compute": 1.5, "waiting": 0.4, "reduce": 0.2}, 2.0 * 2**30, {"parameters": 2.0 * 2**30}, 1)
    assert Change.between(before, after).lines() == [
        "step time: +0.100 s (+5.0%): +0.200 reduce, -0.100 waiting",
        "memory of the fullest row (row 0 before, row 1 now): the same",
    ]


def test_watch(tmp_path: Path) -> None:
    """It checks on every save, goes on after a bad one, and ends with Ctrl-C."""
    path = tmp_path / "a.yaml"
    dump(recorded(), path)
    good = path.read_text()
    code = "import sys\nfrom search.cli import main\nsys.exit(main(['check', sys.argv[1], '--watch']))"
    watcher = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert watcher.stdout is not None
    lines: list[str] = []

    def until(word: str) -> None:
        assert watcher.stdout is not None
        while not lines or word not in lines[-1]:
            line = watcher.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)

    def save(text: str) -> None:
        """Write as editors do: aside, then in place of the old one, with another time."""
        aside = path.with_suffix(".new")
        aside.write_text(text)
        os.utime(aside, ns=(time.time_ns(), time.time_ns()))
        aside.replace(path)

    until("1: ")
    save(good.replace("bucket_size: 100", "bucket_size: nothing"))
    until("error: ")
    save(good)
    until("verified")
    until("1: ")
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(timeout=30) == 0
    watcher.stdout.close()
    assert sum("--- saved" in line for line in lines) == 2
