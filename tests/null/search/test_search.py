"""The search finds what listing everything finds, says what it left out, and gives the same answer every time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import inf
from pathlib import Path

import pytest

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError, InfeasibleError
from search.candidate import Score
from search.cost.memory import RESERVED_GAP, TIGHT_GAPS, USABLE
from search.database import FILE, Database
from search.engine import Candidate, Result, pareto, search, to_data
from search.front import find
from search.generators.base import Generator
from search.generators.best_first import BestFirst
from search.report.table import headline
from search.space import USUAL, Configuration
from tests.null.search.spaces import DENSE, MOE, PLAIN, WIDE_HEAD, Case, best_by_listing, case, leaves

TOP = 10
KEY = {"model": "a"}
RECOMPUTE = ("recompute=none,full",)
LISTED: list[tuple[Architecture, str, int, int, int, Sequence[str], float | None]] = [
    (DENSE, "p4d", 4, 8, 512, ["recompute=none", "b=1,2", "sp=off", *PLAIN], None),
    (DENSE, "p4d", 4, 8, 2048, ["schedule=1f1b,zbv,v_min,gpipe", "sp=off", "b=1,2", *RECOMPUTE, *PLAIN], 1.5),
    (MOE, "p4de", 4, 8, 512, ["schedule=dualpipe,dualpipev,zb_h1", "recompute=none", *PLAIN], None),
    (
        WIDE_HEAD,
        "p4d",
        8,
        16,
        256,
        ["schedule=interleaved_1f1b,v_half,zb_h2", "b=2", "pp=2,4", "recompute=none", *PLAIN],
        None,
    ),
    (MOE, "p4d", 8, 8, 1024, ["schedule=1f1b,dualpipe", "b=1", "sp=off", *RECOMPUTE, *PLAIN], 1.6),
    (DENSE, "p4d", 4, 8, 2048, ["schedule=1f1b,zbv", "b=1,2", "sp=off", "cuts=even", "zero=1,3", *PLAIN], 1.5),
    (
        MOE,
        "p4de",
        16,
        16,
        1024,
        ["pp=2", "tp=1,2", "cp=1,2", "schedule=1f1b", "b=1", "recompute=none", "zero=0,3", *PLAIN[2:]],
        None,
    ),
]


def run(it: Case, *, top: int = TOP, workers: int = 1, budget_s: float = 1e6) -> Result:
    """Search with the orders of the families alone, which can all be listed."""
    return search(it.problem, it.space, top=top, budget_s=budget_s, workers=workers, tune=False)


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len", "fix", "memory_gib"), LISTED)
def test_finds_what_listing_finds(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int, fix: Sequence[str],
    memory_gib: float | None,
) -> None:  # fmt: skip
    it = case(architecture, cluster, gpus, batch, seq_len, fix, memory_gib=memory_gib)
    listed = list(leaves(it.space))
    assert 40 <= len(listed) <= 300
    expected = best_by_listing(it)
    assert len(expected) >= TOP // 2
    found = run(it)
    assert [c.config for c in found.candidates[:TOP]] == [c.config for c in expected[:TOP]]
    assert found.candidates[:TOP] == expected[:TOP]
    assert found.size == len(listed)
    assert found.stopped == "proved"
    assert found.family_gap == 0
    assert sum(found.pruned.values()) + len(found.candidates) == found.size
    assert min(found.pruned.values(), default=1) > 0
    assert not found.rejected
    if memory_gib is not None:
        assert sum(n for reason, n in found.pruned.items() if reason.startswith("memory")) > 0
        assert len(expected) < len(listed)
    for one in (1, 3):  # a shorter list is the head of the longer one
        assert [c.config for c in run(it, top=one).candidates[:one]] == [c.config for c in expected[:one]]


@pytest.mark.parametrize(
    ("architecture", "gpus", "fix"),
    [(DENSE, 8, ["pp=2,4", "b=1,2", "recompute=none", *PLAIN[:2]]), (MOE, 8, ["pp=2", "b=1", "zero=1,3", *PLAIN[:2]])],
)
def test_tuning_adds_what_the_bounds_hold_for(architecture: Architecture, gpus: int, fix: list[str]) -> None:
    """Other orders, buckets, prefetches and streams: never a worse winner, none under the bound for every order."""
    it = case(architecture, "p4d", gpus, 16, 512, fix)
    plain, tuned = run(it), search(it.problem, it.space, budget_s=1e6, workers=1)
    assert tuned.best.key <= plain.best.key
    last = tuned.candidates[min(10, len(tuned.candidates)) - 1].key
    better = {c.config.plain: c for c in reversed(tuned.candidates) if c.config.order == "family"}
    assert all(better[c.config.plain].key <= c.key for c in plain.candidates if c.key <= last)
    assert tuned.reordered > 0
    assert tuned.finer > 0
    listed = [c for c in tuned.candidates if c.config.order == "list"]
    finer = [c for c in tuned.candidates if (c.config.bucket, c.config.prefetch, c.config.streams) != USUAL]
    assert tuned.proof_gap >= tuned.family_gap
    alike = {(c.config.plain, c.config.order) for c in tuned.candidates}
    assert len(alike) == len(tuned.candidates), "of those that differ in bucket, prefetch or streams alone, one"
    family = sum(c.config.order == "family" for c in tuned.candidates)
    assert sum(tuned.pruned.values()) + family + tuned.alike == tuned.size
    for each in (*listed[:1], *finer[:1]):
        assert it.problem.score(each.config) == each.score


def test_the_leanest() -> None:
    it = case(DENSE, "p4d", 4, 8, 512, ["b=1,2", "sp=off", "recompute=none,full", *PLAIN])
    found = search(it.problem, it.space, budget_s=1e6, workers=1, objective="memory")
    least = min(it.problem.score(config).worst_row_bytes for config in leaves(it.space))
    assert found.best.score.worst_row_bytes == least
    assert found.family_gap == 0
    assert found.least_s <= least


def test_a_front_runs_from_quick_to_lean() -> None:
    it = case(DENSE, "p4d", 4, 8, 512, ["b=1,2", "sp=off", "recompute=none,full", *PLAIN])
    found = find(it.problem, it.space, objective="pareto", budget_s=1e6, workers=1)
    front = [each.score for each in found.candidates]
    assert pareto(found.candidates) == list(range(len(front)))
    assert len(front) >= 3
    for score in front:
        assert score.margin_bytes + score.worst_row_bytes == pytest.approx(it.problem.cluster.device.memory_bytes)
    assert front[0].step_time_s == run(it).best.score.step_time_s
    leanest = search(it.problem, it.space, budget_s=1e6, workers=1, objective="memory")
    assert front[-1].worst_row_bytes == leanest.best.score.worst_row_bytes < 0.9 * front[0].worst_row_bytes
    assert "is the leanest" in headline(leanest)


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """Resumed, it ends as if it had never stopped, and evaluates nothing twice; a line cut short is dropped."""
    it = small()
    whole = search(it.problem, it.space, budget_s=1e6, workers=1, database=Database.start(tmp_path / "a", KEY))
    lines = (tmp_path / "a" / FILE).read_text().splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FILE).write_text("".join(lines[:12]) + lines[12][:30])
    database = Database.resume(tmp_path / "b", KEY)
    assert len(database.known) == 11
    resumed = search(it.problem, it.space, budget_s=1e6, workers=1, database=database)
    assert told(resumed) == told(whole)
    assert (tmp_path / "b" / FILE).read_text() == "".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a search's file"),
        ("[]\n", "is not a search's file"),
        ('{"format": 99, "search": {}}\n', "has format 99.*; name another folder"),
        ('{"format": 1, "search": {"model": "b"}}\n', 'another search.*model "b" there, "a" here'),
        ('{"format": 1, "search": {"model": "a"}}\n{"config": 3}\n', "line 2: not an outcome.*without that line"),
        ('{"format": 1, "search": {"model": "a"}}\nnonsense\n', "line 2: not an outcome"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=reason):
        Database.resume(tmp_path, KEY)
    assert (tmp_path / FILE).read_text() == text
    if "line 2" not in reason:
        with pytest.raises(ConfigError, match=reason):
            Database.start(tmp_path, KEY)
        assert (tmp_path / FILE).read_text() == text


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no candidates\.jsonl in it"):
        Database.resume(tmp_path, KEY)


def small() -> Case:
    return case(DENSE, "p4d", 4, 8, 512, ["recompute=none", "b=1,2", "sp=off", *PLAIN])


def told(result: Result) -> str:
    """Return all of a result but its clock."""
    data = to_data(result, seed=0)
    del data["wall_s"]
    return json.dumps(data)


def test_the_same_answer_with_any_number_of_workers_and_in_a_new_process() -> None:
    here = told(run(small()))
    assert told(run(small())) == here
    assert told(run(small(), workers=2)) == here
    program = "from tests.null.search.test_search import run, small, told\nprint(told(run(small(), workers=3)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == here + "\n"


def test_ties_stand_in_the_order_of_configurations() -> None:
    it = case(DENSE, "p4d", 2, 4, 256, ["pp=2", "schedule=1f1b,gpipe,zb_h1", "recompute=none", *PLAIN])
    found = run(it, top=50)
    keys = [candidate.key for candidate in found.candidates]
    assert keys == sorted(keys)
    tied = [(a, b) for a, b in pairwise(keys) if a[0] == b[0]]
    assert tied, "the case no longer has a tie"


def test_of_equals_the_usual_comes_first() -> None:
    it = case(DENSE, "p4d", 16, 16, 256, ["pp=2", "tp=1", "cp=1", "zero=1", "b=1", "schedule=1f1b", *PLAIN[2:]])
    found = run(it, top=1).best
    plain, finer = found.config.plain, replace(found.config.plain, bucket=2)
    same = [
        replace(found, config=config)
        for config in (replace(finer, streams="data"), replace(finer, outer="dp"), finer, plain)
    ]
    assert [each.config for each in sorted(same, key=lambda each: each.key)][:2] == [plain, finer]
    assert replace(plain, streams="data") < plain  # by name alone it would come first


def test_a_budget_ends_between_batches_and_says_what_was_not_reached() -> None:
    it = case(DENSE, "p4de", 16, 64, 2048, [*RECOMPUTE, *PLAIN])
    found = run(it, budget_s=1e-9)
    assert found.stopped == "budget"
    assert found.candidates
    assert found.pruned["not reached"] > 0
    assert sum(found.pruned.values()) + len(found.candidates) == found.size
    best = found.best.score.step_time_s
    whole = run(it, budget_s=5.0)
    assert whole.best.score.step_time_s >= best * (1 - found.proof_gap) * (1 - 1e-9)


def test_a_deadline_is_no_proof() -> None:
    """What an expired ``ask`` returns is part of a batch, perhaps none of it, and everything else is still there."""
    it = small()
    whole = BestFirst(it.space, it.problem.bounds, inf)
    cut = BestFirst(it.space, it.problem.bounds, inf)
    expected = [config for _ in range(4) for config in whole.ask(8, inf)]
    assert not whole.expired
    assert cut.ask(8, inf, 0.0) == []
    assert cut.expired
    assert cut.bound() <= whole.bound()
    assert [config for _ in range(4) for config in cut.ask(8, inf)] == expected
    assert not cut.expired


def test_a_pause_loses_nothing() -> None:
    """After so many nodes what was found is returned, maybe nothing; the rest comes later, in the same order."""
    it = small()
    whole, cut = (BestFirst(it.space, it.problem.bounds, inf) for _ in range(2))
    expected = [config for _ in range(4) for config in whole.ask(8, inf)]
    assert not whole.paused
    assert cut.ask(8, inf, most=1) == []
    assert cut.paused
    assert not cut.expired
    found, pauses = list[Configuration](), 0
    while len(found) < len(expected):
        found += cut.ask(1, inf, most=7)
        pauses += cut.paused
    assert found == expected
    assert pauses > 4


def test_what_is_promising_settles() -> None:
    """Nothing that is found later is more so."""
    it = case(DENSE, "p4d", 8, 64, 512, PLAIN)
    generator, settled = BestFirst(it.space, it.problem.bounds, inf), list[Configuration]()
    for _ in range(2000):
        for config in generator.ask(1, inf, most=10):
            generator.tell(config, None)
        if generator.settled() and not settled:
            settled, unsure = generator.promising(), generator.bound()
    assert settled
    assert generator.bound() > unsure
    assert generator.promising() == settled


@pytest.mark.parametrize("workers", [1, 2])
def test_the_budget_cuts_a_batch_short(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that would outlast the budget is dropped, and nothing is called proved for it."""
    it = small()
    (first,) = BestFirst(it.space, it.problem.bounds, inf).ask(1, inf)
    score = it.problem.score

    def slow(config: Configuration) -> Score:
        if config != first:
            time.sleep(0.6 if workers == 1 else 600)
        return score(config)

    monkeypatch.setattr(it.problem, "score", slow)
    start = time.perf_counter()
    found = run(it, budget_s=0.4, workers=workers)
    assert time.perf_counter() - start < 60
    assert found.stopped == "budget"
    assert found.simulated <= 2
    assert found.best.config == first or workers == 1
    assert found.pruned["not reached"] > 0
    assert found.least_left_s <= run(small()).candidates[2].score.step_time_s
    assert sum(found.pruned.values()) + len(found.candidates) == found.size


def test_what_is_proved() -> None:
    """All rows at the end; before that, those that nothing left can beat."""
    found = run(small())
    assert found.proved >= TOP
    part = replace(found, least_left_s=found.candidates[2].score.step_time_s)
    assert part.proved == sum(c.score.step_time_s <= part.least_left_s for c in found.candidates)
    assert replace(found, least_left_s=0.0).proved == 0


def test_an_interrupt_gives_the_best_so_far() -> None:
    it = case(DENSE, "p4de", 16, 64, 2048, [*RECOMPUTE, *PLAIN])

    def stop(result: Result, generator: Generator) -> None:
        if result.simulated > 12:
            raise KeyboardInterrupt

    found = search(it.problem, it.space, workers=1, budget_s=1e6, progress=stop, tune=False)
    assert found.stopped == "interrupted"
    assert 12 < found.simulated < 30
    assert found.candidates == sorted(found.candidates, key=lambda candidate: candidate.key)
    assert found.proof_gap < 1
    assert sum(found.pruned.values()) + len(found.candidates) == found.size


def test_an_interrupt_before_anything_fits_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: BestFirst, *_: float) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(BestFirst, "ask", stop)
    with pytest.raises(KeyboardInterrupt):
        run(small())


@pytest.mark.parametrize(
    ("memory_gib", "words"),
    [
        (1.0, ("none of ", " fits 1.0 GiB a GPU", "GiB short")),
        (0.5, ("none of ", " fits 0.5 GiB a GPU", "GiB short")),
    ],
)
def test_nothing_fits(memory_gib: float, words: tuple[str, ...]) -> None:
    it = case(DENSE, "p4d", 4, 8, 2048, [*RECOMPUTE, *PLAIN], memory_gib=memory_gib)
    with pytest.raises(InfeasibleError) as caught:
        run(it)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert f"{len(list(leaves(it.space))):,} configurations" in text


def test_what_is_short_is_true() -> None:
    """The configuration that the message names does not need less than the message says."""
    it = case(DENSE, "p4d", 4, 8, 2048, [*RECOMPUTE, *PLAIN], memory_gib=1.02)
    with pytest.raises(InfeasibleError, match="GiB short") as caught:
        run(it)
    text = str(caught.value)
    need = float(text.partition(" needs ")[2].split()[0])
    words = text.partition("short: ")[2].partition(" needs ")[0]
    forms = {"cuts": ""}, {"micro_batch": 0}, {}
    named = next(c for c in leaves(it.space) if words in [str(replace(c, **form)) for form in forms])  # type: ignore[arg-type]
    rows = it.problem.score(named).memory
    most = max(sum(row.values()) + row["reserved_gap"] * (TIGHT_GAPS[1] / RESERVED_GAP - 1) for row in rows)
    assert 1.02 * USABLE <= need <= most / 2**30 + 0.051


def test_pareto_has_what_nothing_beats() -> None:
    found = run(small(), top=40).candidates
    front = pareto(found)
    for i, candidate in enumerate(found):
        beaten = any(_beats(other, candidate) for other in found)
        assert (i in front) == (not beaten)


def _beats(a: Candidate, b: Candidate) -> bool:
    x, y = (a.score.step_time_s, a.score.worst_row_bytes), (b.score.step_time_s, b.score.worst_row_bytes)
    return all(m <= n for m, n in zip(x, y, strict=True)) and (x < y or (x == y and a.key < b.key))


def test_counts_do_not_depend_on_what_a_person_fixes() -> None:
    whole = list(leaves(case(MOE, "p4de", 8, 16, 256, [*PLAIN]).space))
    parts = [list(leaves(case(MOE, "p4de", 8, 16, 256, [f"pp={pp}", *PLAIN]).space)) for pp in (1, 2, 4, 8)]
    assert list(chain(*parts)) == whole
