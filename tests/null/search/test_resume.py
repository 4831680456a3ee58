"""A search that is cut, interrupted or killed: it ends between batches, and goes on as if nothing had happened."""

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

from piper_core.errors import ConfigError, RunError
from search.candidate import Score
from search.database import FILE, Database
from search.engine import Result, search
from search.front import find
from search.generators.sampled import JOURNAL
from search.problem import Problem
from search.space import Configuration
from tests.null.search.spaces import PLAIN, Case
from tests.null.search.test_search import DENSE, KEY, case, told

FIX = ["recompute=none", "b=1,2", "sp=off", "schedule=1f1b,zbv,interleaved_1f1b", *PLAIN[:2]]
MAIN = ["-c", "import sys; from search.cli import main; sys.exit(main())"]
QUICK = ["--model", "tiny-llama", "--gpus", "4", "--global-batch", "64", "--execute", "0", "--budget", "600"]


def some() -> Case:
    return case(DENSE, "p4d", 4, 8, 512, FIX)


def whole(it: Case, **options: Any) -> Result:
    return search(it.problem, it.space, **{"budget_s": 1e6, "workers": 1, **options})


class Counted:
    """Counts evaluations and does something before one of them."""

    def __init__(self, it: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, self.at, self.score = 0, 0, it.problem.score
        self.clock_s = 0.0
        monkeypatch.setattr(it.problem, "score", self)
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock_s)

    def __call__(self, config: Configuration) -> Score:
        self.n += 1
        if self.n == self.at:
            self.happens()
        return self.score(config)

    def happens(self) -> None:
        """Let the budget end."""
        self.clock_s = 1e9


class Interrupted(Counted):
    def happens(self) -> None:
        raise KeyboardInterrupt


def found(result: Result) -> list[tuple[Configuration, Score]]:
    return [(each.config, each.score) for each in result.candidates]


@pytest.mark.parametrize("at", [10, 14, 20, 24, 30])
def test_a_budget_that_ends_in_a_batch_gives_what_was_found_before_it(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches give the same candidates, whatever ended the search, and with any number of workers."""
    it = some()
    every = whole(it)
    assert every.stopped == "proved"
    assert every.batches[0] >= 3
    assert every.batches[1] >= 3
    cut = some()
    Counted(cut, monkeypatch).at = at
    part = whole(cut)
    assert part.stopped == "budget" or part.batches[0] == every.batches[0]  # what is tuned is proved
    assert 0 < sum(part.batches) < sum(every.batches)
    monkeypatch.undo()
    most = (part.batches[0], part.batches[1])
    assert found(part) == found(whole(it, batches=most)) == found(whole(some(), batches=most, workers=2))
    assert part.best.score.step_time_s >= every.best.score.step_time_s


def test_the_first_that_fits_is_kept_of_a_batch_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    it = some()
    first, *rest = (config for config, _ in found(whole(it, batches=(1, 0))))
    for kind in Counted, Interrupted:
        cut = some()
        kind(cut, monkeypatch).at = 5
        part = whole(cut)
        monkeypatch.undo()
        assert part.batches[0] == 0
        assert part.stopped == ("budget" if kind is Counted else "interrupted")
        assert {config for config, _ in found(part)} <= {first, *rest}
        assert len(part.candidates) == (5 if kind is Counted else 4)  # an evaluation in this process is not cut


@pytest.mark.parametrize("at", [1, 6, 13, 21, 26, 32])
def test_an_interrupted_search_goes_on(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evaluated by then is evaluated no more, and the end is that of a search that nothing interrupted, be it
    the whole of it or that many batches; it can be resumed as soon as its first evaluation has begun."""
    expected = told(whole(some()))
    short = told(whole(some(), batches=(2, 3)))
    it = some()
    calls = Interrupted(it, monkeypatch)
    calls.at = at
    try:
        assert whole(it, database=Database.start(tmp_path, KEY)).stopped == "interrupted"
    except KeyboardInterrupt:
        assert at == 1
    calls.n, calls.at = 0, 10**9
    database = Database.resume(tmp_path, KEY)
    assert len(database.known) == at - 1
    assert told(whole(it, database=database)) == expected
    assert calls.n == len((tmp_path / FILE).read_text().splitlines()) - at
    assert told(whole(it, database=Database.resume(tmp_path, KEY), batches=(2, 3))) == short


def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evaluated before is kept, and answers a search that goes on."""
    it = some()
    done = {config for config, _ in found(whole(it, batches=(1, 0)))}
    score = it.problem.score

    def dies(config: Configuration) -> Score:
        if config not in done:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(config)

    monkeypatch.setattr(it.problem, "score", dies)
    with pytest.raises(RunError, match=r"was killed.*go on with --resume, and with fewer --workers"):
        whole(it, workers=2, database=Database.start(tmp_path, KEY))
    monkeypatch.undo()
    database = Database.resume(tmp_path, KEY)
    assert len(database.known) == len(done)
    assert told(whole(it, database=database)) == told(whole(some()))


def test_a_lock_that_a_kill_left_is_not_waited_for(tmp_path: Path) -> None:
    journal = tmp_path / JOURNAL
    journal.touch()
    (tmp_path / f"{JOURNAL}.lock").symlink_to(journal)
    start = time.perf_counter()
    assert whole(some(), journal=journal).finer > 0
    assert time.perf_counter() - start < 20
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_nothing_is_written_before_something_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("search.engine.BestFirst.ask", stop)
    with pytest.raises(KeyboardInterrupt):
        whole(some(), database=Database.start(tmp_path / "out", KEY))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"there is no candidates\.jsonl in it; .*begin one with --out"):
        Database.resume(tmp_path / "out", KEY)


def answer(folder: Path) -> tuple[dict[str, Any], str]:
    """Return what a search wrote but its clock and its folder's name."""
    data = json.loads((folder / "result.json").read_text())
    del data["wall_s"]
    for each in (data["best"], *data["candidates"]):
        del each["strategy_file"]
    return data, (folder / "best.strategy.yaml").read_text()


def piper_search(*words: str) -> None:
    subprocess.run([sys.executable, *MAIN, *QUICK, *words], capture_output=True, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="workers outlive a killed parent")
def test_a_process_that_is_killed_or_interrupted(tmp_path: Path) -> None:
    """As soon as the file is there, after the first batch, and in tuning."""
    piper_search("--out", str(tmp_path / "whole"))
    expected = answer(tmp_path / "whole")
    cases = [(lines, sent) for lines in (1, 9, 20) for sent in (signal.SIGKILL, signal.SIGINT)]
    for number, (lines, sent) in enumerate(cases):
        folder = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, *MAIN, *QUICK, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        while process.poll() is None and not _has(folder / FILE, lines):
            time.sleep(0.002)
        os.kill(process.pid, sent)
        assert process.wait(60) in (0, -sent, 130)
        piper_search("--resume", str(folder), "--workers", str(1 + number % 3))
        assert answer(folder) == expected
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


INTERRUPTED_FORK = """
import os, signal, sys
from search.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(main())
"""


def test_an_interrupt_while_workers_start(tmp_path: Path) -> None:
    """It is not lost, and nothing is said but that."""
    words = [sys.executable, "-c", INTERRUPTED_FORK, *QUICK, "--workers", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "piper-search: error: interrupted\n")


def _has(path: Path, lines: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= lines


def test_a_front_goes_on_with_all_of_its_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits differs from one search of a front to the next, so each has a file of its own."""
    scored: list[Configuration] = []
    score = Problem.score

    def counted(self: Problem, config: Configuration, **options: Any) -> Score:
        scored.append(config)
        return score(self, config, **options)

    monkeypatch.setattr(Problem, "score", counted)

    def front(database: Database) -> list[tuple[Configuration, Score]]:
        it = case(DENSE, "p4d", 4, 8, 512, ["recompute=none,full", *FIX[1:]])
        return found(find(it.problem, it.space, objective="pareto", budget_s=1e6, workers=1, database=database))

    first, n = front(Database.start(tmp_path, KEY)), len(scored)
    assert len(first) > 1
    files = sorted(path.name for path in tmp_path.iterdir())
    assert FILE in files
    assert len([name for name in files if name.startswith("candidates.")]) > 2
    scored.clear()
    assert front(Database.resume(tmp_path, KEY)) == first
    assert len(scored) < n / 4, "those reported are verified again"
    assert front(Database.start(tmp_path, KEY)) == first
