"""Refinement: never worse, legal, true to its locks, and gentle with the file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper_core.errors import ConfigError, DirectiveError
from piper_core.program.strategy import Strategy, base_dag, dump, load
from piper_core.schedule.compile import compile_program
from profiler.spec import load_cluster
from profiler.store import save
from search.cli import main
from search.price import price
from search.pricing import Pricing
from search.refine.climb import Climb, climb
from search.refine.degrees import degree_moves
from search.refine.lock import FIELDS, Locks
from search.refine.moves import coarse_moves, fine_moves
from tests.null.export.strategies import data_parallel, pipeline
from tests.null.profiler.made import profile

P4DE = load_cluster("p4de")


def small(**more: Any) -> Strategy:
    """A pipeline with room to improve: layers badly cut, gradients reduced in one piece."""
    return pipeline("gpipe", 2, 4, row=2, layers=[6, 2], model="dense:8", more=[data_parallel()], **more)


def refine(strategy: Strategy, *locks: str, most: int = 30, seed: int = 0) -> Climb:
    base = base_dag(strategy)
    compiled = compile_program(strategy.program, base, strategy.header.world)
    held = Locks.of(locks, strategy, compiled)
    return climb(strategy, compiled, base, P4DE, held, budget_s=600, most=most, seed=seed)


def scored(strategy: Strategy) -> float:
    compiled = compile_program(strategy.program, base_dag(strategy), strategy.header.world)
    return price(strategy, compiled, P4DE).score.step_time_s


def test_it_gets_better_and_says_how() -> None:
    strategy = small()
    found = refine(strategy, "recompute", "split", "zero", most=60)
    assert found.score.step_time_s < 0.95 * scored(strategy)
    assert found.score.step_time_s == scored(found.strategy)
    assert any(line.startswith("stage(") for line in found.done)


def test_fields_that_are_locked_stay() -> None:
    strategy = small()
    for field in ("layers", "zero", "schedule", "order"):
        found = refine(strategy, field, most=15)
        assert FIELDS[field](found.strategy) == FIELDS[field](strategy)
    everything = refine(strategy, *FIELDS)
    assert (everything.done, everything.tried, everything.stopped) == ([], 0, "nothing")
    assert everything.locked > 0


def test_what_a_filter_matches_stays() -> None:
    strategy = small()
    found = refine(strategy, "PP=1", most=20)
    before, after = (
        compile_program(each.program, base_dag(each), each.header.world) for each in (strategy, found.strategy)
    )
    assert Locks.of(["PP=1"], strategy, before).keeps_compiled(after)
    assert found.locked > 0
    other = refine(strategy, "PP=0", "MB=0-1", most=10)
    kept = compile_program(other.strategy.program, base_dag(other.strategy), other.strategy.header.world)
    assert Locks.of(['{"PP": 0}', "MB=0-1"], strategy, before).keeps_compiled(kept)


def test_what_does_not_fit_is_made_to_fit() -> None:
    """First smaller, then quicker."""
    strategy = pipeline("1f1b", 2, 4, model="llama9b", total=36, seq_len=4096, row=2, more=[data_parallel()],
                        global_batch=16)  # fmt: skip
    compiled = compile_program(strategy.program, base_dag(strategy), strategy.header.world)
    assert price(strategy, compiled, P4DE).score.fits == "no"
    assert refine(strategy, most=25).score.fits == "yes"


def test_every_move_is_near_and_some_run() -> None:
    strategy = small()
    base = base_dag(strategy)
    compiled = compile_program(strategy.program, base, strategy.header.world)
    moves = [*coarse_moves(strategy, compiled, base), *fine_moves(strategy, compiled, base)]
    assert len({move.strategy.program for move in moves}) == len(moves)
    words = " ".join(move.words for move in moves)
    for what in ("stage(", "split(", "replicate(", "recompute(", "schedule gpipe became 1f1b"):
        assert what in words
    for move in moves:
        try:
            compile_program(move.strategy.program, base, move.strategy.header.world)
        except DirectiveError:
            continue


def test_the_same_seed_gives_the_same_answer() -> None:
    one, other, third = (refine(small(), "stage", "split", "replicate", "recompute", seed=seed) for seed in (3, 3, 4))
    assert (one.done, one.tried, one.strategy) == (other.done, other.tried, other.strategy)
    assert third.tried == one.tried


@pytest.mark.parametrize(
    ("lock", "reason"),
    [("zer", "did you mean zero?"), ("PP", "no field and no filter"), ("{", "is no JSON"), ("PP=x y", "no field")],
)
def test_bad_locks(lock: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        refine(small(), lock)


def test_a_lock_that_matches_nothing() -> None:
    with pytest.raises(DirectiveError, match="matches nothing"):
        refine(small(), "PP=7")


def test_the_file_keeps_its_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(small(), tmp_path / "mine.yaml")
    text = (tmp_path / "mine.yaml").read_text()
    text = text.replace('model: "dense:8"', '# a note of mine\nmodel: "dense:8"  # and another')
    text = text.replace("  # 4 microbatches", "  # the batch, as the paper has it")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["refine", str(tmp_path / "mine.yaml"), "--budget", "1s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    target = tmp_path / "mine.refined.yaml"
    assert data["file"] == str(target)
    assert data["done"]
    made = target.read_text()
    for comment in ("# a note of mine", "# and another", "# the batch, as the paper has it"):
        assert comment in made
    keys = [line.split(":")[0] for line in made.splitlines() if re.match(r"\w", line)]
    assert [key for key in keys if key != "predicted"] == [
        line.split(":")[0] for line in text.splitlines() if re.match(r"\w", line)
    ]
    strategy = load(target)
    assert strategy.header.predicted["step_time_s"] == pytest.approx(data["predicted"]["step_time_s"], rel=1e-6)
    assert main(["check", str(target)]) == 0
    assert "step time: the same" in capsys.readouterr().out


def test_json_files_stay_json(tmp_path: Path) -> None:
    dump(small(), tmp_path / "mine.json")
    assert main(["refine", str(tmp_path / "mine.json"), "--budget", "1", "-o", str(tmp_path / "new.json")]) == 0
    assert list(json.loads((tmp_path / "new.json").read_text()))[:2] == ["model", "cluster"]


def test_nothing_better_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(small(), tmp_path / "mine.yaml")
    assert main(["refine", str(tmp_path / "mine.yaml"), "--lock", *FIELDS]) == 0
    assert "nothing better was found" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("strategy", "words", "reason"),
    [
        (small(cluster=None), [], "names no cluster"),
        (small(), ["--budget", "soon"], "positive number of seconds"),
        (small(), ["--lock", "nothing"], "no field and no filter"),
    ],
)
def test_refused(
    strategy: Strategy, words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(strategy, tmp_path / "mine.yaml")
    assert main(["refine", str(tmp_path / "mine.yaml"), *words]) == 2
    assert reason in capsys.readouterr().err


def test_an_interrupt_keeps_the_best(tmp_path: Path) -> None:
    dump(small(), tmp_path / "mine.yaml")
    code = """
import os, signal, sys
from search.cli import main
from search.refine import climb
taken = climb._better
def better(*keys):
    if taken(*keys):
        os.kill(os.getpid(), signal.SIGALRM)  # from now on: interrupted at the next move
        return True
    return False
def interrupt(*_):
    climb._tried = stop
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
climb._better = better
sys.exit(main(["refine", sys.argv[1], "--budget", "60s", "--json"]))
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "mine.yaml")], capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert time.monotonic() - start < 50
    data = json.loads(done.stdout)
    assert data["stopped"] == "interrupted"
    assert data["done"]
    assert (tmp_path / "mine.refined.yaml").exists()


def deep() -> Strategy:
    """Four rows of one rank for two microbatches: mostly bubble."""
    return pipeline("1f1b", 4, 2, model="piper-1b", mesh={"pp": 4, "dp": 1, "tp": 1}, global_batch=8)


def test_degrees_move_where_the_recipe_made_the_program() -> None:
    strategy = deep()
    found = refine(strategy, most=60)
    assert found.strategy.header.mesh is not None
    assert found.strategy.header.mesh.degree("dp") > 1
    assert found.score.step_time_s == scored(found.strategy)
    assert found.score.step_time_s < 0.7 * scored(strategy)
    held = refine(strategy, "pp", most=40)
    assert held.strategy.header.mesh is not None
    assert held.strategy.header.mesh.degree("pp") == 4


def test_degrees_stay_where_a_person_arranged_more() -> None:
    strategy = pipeline("1f1b", 2, 4, row=2, model="piper-1b", mesh={"pp": 2, "dp": 2, "tp": 1},
                        more=[data_parallel(), {"op": "recompute", "filter": {"PP": 0}, "policy": "full"}])  # fmt: skip
    compiled = compile_program(strategy.program, base_dag(strategy), strategy.header.world)
    assert list(degree_moves(strategy, compiled)) == []
    plain = pipeline("1f1b", 2, 4, row=2, model="piper-1b", mesh={"pp": 2, "dp": 2, "tp": 1}, more=[data_parallel()])
    compiled = compile_program(plain.program, base_dag(plain), plain.header.world)
    moves = list(degree_moves(plain, compiled))
    assert len({(move.strategy.header.mesh, move.strategy.program) for move in moves}) == len(moves)
    assert any("became pp=4 1f1b" in move.words for move in moves)
    assert any("outer=dp" in move.words for move in moves)


def test_a_file_with_other_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The header follows the program: mesh, microbatch, schedule."""
    dump(deep(), tmp_path / "mine.yaml")
    assert main(["refine", str(tmp_path / "mine.yaml"), "--lock", "order", "tp", "--budget", "0.1s"]) == 0
    capsys.readouterr()
    assert main(["refine", str(tmp_path / "mine.yaml"), "--lock", "tp", "--budget", "4s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    made = load(data["file"])
    compiled = compile_program(made.program, base_dag(made), made.header.world)
    assert price(made, compiled, P4DE).score.step_time_s == pytest.approx(data["predicted"]["step_time_s"])
    assert main(["check", data["file"]]) == 0


def test_an_empty_prediction_is_filled(tmp_path: Path) -> None:
    dump(small(), tmp_path / "mine.yaml")
    text = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("seq_len: 1024\n", "seq_len: 1024\npredicted: null  # to come\n"))
    assert main(["refine", str(tmp_path / "mine.yaml"), "--budget", "1s"]) == 0
    made = (tmp_path / "mine.refined.yaml").read_text()
    assert "# to come" in made
    assert load(tmp_path / "mine.refined.yaml").header.predicted["step_time_s"] > 0


def test_it_prices_by_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the one that is named, then by the one that the file says; none where that is wished."""
    kept, source = tmp_path / "a.profile.json", tmp_path / "mine.yaml"
    save(profile(), kept)
    asked = ["--model", "tiny-llama", "--gpus", "2", "--cluster", "cpu", "--seq-len", "128", "--global-batch", "8"]
    assert main([*asked, "--profile", "none", "--fix", "pp=2", "schedule=gpipe", "--out", str(tmp_path / "out")]) == 0
    source.write_text((tmp_path / "out" / "best.strategy.yaml").read_text())
    capsys.readouterr()
    assert main(["refine", str(source), "--profile", str(kept), "--budget", "3s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["priced_by"]["profile"] == str(kept)
    assert data["done"]
    refined = Path(data["file"])
    told = load(refined)
    assert told.header.predicted["profile"] == str(kept)
    assert told.header.predicted["step_time_s"] == pytest.approx(Pricing.of(kept).predict(told).score.step_time_s)
    assert main(["refine", str(refined), "--budget", "1s"]) == 0
    assert "by a profile of" in capsys.readouterr().out
    assert main(["refine", str(refined), "--profile", "none", "--budget", "1s", "-o", str(tmp_path / "n.yaml")]) == 0
    assert "by a profile of" not in capsys.readouterr().out
    assert main(["refine", str(source), "--profile", str(tmp_path / "nothing.json")]) == 2
    assert "No such file" in capsys.readouterr().err
