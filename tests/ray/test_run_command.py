"""``piper-search run`` on a cluster of its own: what it prints, and what Ctrl-C and the loss of Ray's head leave."""

from __future__ import annotations

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
from tests.ray.strategies import pipeline, runs

COMMAND = [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", "run"]
pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A strategy file for tiny-llama."""
    strategy = pipeline()
    path = tmp_path / "two.yaml"
    dump(replace(strategy, header=replace(strategy.header, model="tiny-llama", cluster="cpu", seq_len=8)), path)
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


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue
        below.setdefault(parent, []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        children = below.get(left.pop(), [])
        found += children
        left += children
    return found


def ended(process: subprocess.Popen[str], how: Callable[[list[int]], None]) -> tuple[int, str, list[int]]:
    """End a run in some way after its second step; return status, the last line of its errors, what is left of it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1"):
            break
    below = descendants(process.pid)
    assert len(below) > 4  # Ray's own, and two ranks
    how(below)
    _, errors = process.communicate(timeout=100)
    until = time.monotonic() + 10
    while any(map(runs, below)) and time.monotonic() < until:
        time.sleep(0.1)
    return process.returncode, errors.strip().splitlines()[-1], [pid for pid in below if runs(pid)]


def folders(pid: int) -> list[Path]:
    import tempfile

    return list(Path(tempfile.gettempdir()).glob(f"piper-ray-{pid}-*"))


def test_interrupt_ends_everything(file: Path) -> None:
    with running(file, "--steps", 100_000) as process:
        status, last, left = ended(process, lambda _: os.kill(process.pid, signal.SIGINT))
        assert (status, last, left, folders(process.pid)) == (130, "piper-search: error: interrupted", [], [])


def test_without_the_head_the_run_ends(file: Path) -> None:
    def kill_head(below: list[int]) -> None:
        (head,) = (pid for pid in below if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"))
        os.kill(head, signal.SIGKILL)

    with running(file, "--steps", 100_000) as process:
        status, last, left = ended(process, kill_head)
        assert (status, left, folders(process.pid)) == (2, [], [])
        assert re.search(r"Ray's head at \S+ is gone; the run has ended", last), last
