"""``piper-search run`` on a cluster of its own: what it prints, and what Ctrl-C and the loss of Ray's head leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from piper_core.program.strategy import dump
from piper_core.runtime.ray_session import below, naming
from tests.ray.strategies import pipeline, runs

COMMAND = [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", "run"]
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A strategy file for a model of two layers."""
    strategy, config, path = pipeline(), tmp_path / "config.json", tmp_path / "two.yaml"
    config.write_text(json.dumps(CONFIG))
    dump(replace(strategy, header=replace(strategy.header, model=str(config), cluster="cpu")), path)
    return path


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str], how: Callable[[list[int]], None]) -> tuple[int, str, list[int]]:
    """End a run in some way after its second step; return status, the last line of its errors, what is left of it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1"):
            break
    started = below([process.pid])
    assert len(started) > 4  # Ray's own, and two ranks
    how(started)
    _, errors = process.communicate(timeout=100)
    until = time.monotonic() + 10
    while any(map(runs, started)) and time.monotonic() < until:
        time.sleep(0.1)
    return process.returncode, errors.strip().splitlines()[-1], [pid for pid in started if runs(pid)]


def agent(pid: int) -> bool:
    try:
        return b"agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def folders(pid: int) -> list[Path]:
    import tempfile

    return list(Path(tempfile.gettempdir()).glob(f"piper-ray-{pid}-*"))


def test_a_check_in_float64_is_not_compared_with_a_prediction(file: Path) -> None:
    with running(file, "--check", "--steps", 2, "--json") as process:
        made, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    data = json.loads(made)
    assert data["not_compared"] == "not compared with the prediction, which is not of float64"
    assert (data["predicted_step_time_s"], data["predicted_memory_bytes_by_row"]) == (None, [])
    assert data["step_time_s"] > 0


def test_interrupt_ends_everything(file: Path) -> None:
    with running(file, "--steps", 100_000) as process:
        status, last, left = ended(process, lambda _: os.kill(process.pid, signal.SIGINT))
        assert (status, last, left, folders(process.pid)) == (130, "piper-search: error: interrupted", [], [])


def test_interrupt_while_ray_starts(file: Path) -> None:
    """At the first of its agents, which outlive what has started them."""
    with running(file, "--steps", 100_000) as process:
        until = time.monotonic() + 100
        while not any(map(agent, started := below([process.pid]))) and time.monotonic() < until:
            time.sleep(0.01)
        session = next(iter(folders(process.pid)))
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        assert (process.returncode, errors.strip().splitlines()[-1]) == (130, "piper-search: error: interrupted")
        left = [pid for pid in {*started, *naming(session)} if runs(pid)]
        assert (left, folders(process.pid)) == ([], [])


def test_without_the_head_the_run_ends(file: Path) -> None:
    def kill_head(started: list[int]) -> None:
        (head,) = (pid for pid in started if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"))
        os.kill(head, signal.SIGKILL)

    with running(file, "--steps", 100_000) as process:
        status, last, left = ended(process, kill_head)
        assert (status, left, folders(process.pid)) == (2, [], [])
        assert re.search(r"Ray's head at \S+ is gone; the run has ended", last), last
