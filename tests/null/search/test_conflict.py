"""When nothing fits, what is said to conflict does, and what is said to help does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from piper_core.errors import ConfigError
from search.conflict import explain, why_not
from search.engine import search
from search.shortfall import NothingFitsError
from tests.null.search.spaces import DENSE, PLAIN, Case, case


def run(it: Case) -> None:
    search(it.problem, it.space, budget_s=1e6, workers=1, tune=False)


def test_the_smallest_conflict_and_what_would_fit() -> None:
    """At 1.1 GiB a GPU zero=0 is too much and pp=2 does not matter."""
    it = case(DENSE, "p4d", 4, 8, 512, ["zero=0", "pp=1", "sp=off", "recompute=none", *PLAIN], memory_gib=1.12)
    with pytest.raises(NothingFitsError):
        run(it)
    text = explain(it.problem, it.space)
    first, *changes = text.splitlines()
    assert first.startswith("these conflict: ")
    assert "--gpus 4, --seq-len 512, 1.1 GiB a GPU" in first
    core = re.findall(r"--fix (\w+)=(\S+?),", first)
    assert core
    assert {name for name, _ in core} <= set(it.space.fix)
    kept = [f"{name}={values}" for name, values in core]
    with pytest.raises(NothingFitsError):  # the core alone conflicts
        run(case(DENSE, "p4d", 4, 8, 512, kept, memory_gib=1.12))
    named = [re.match(r"would fit: without --fix (\w+)=", line) for line in changes]
    freed = [match[1] for match in named if match]
    assert freed
    for name in freed:  # and not without any of these
        rest = [text for text in kept if not text.startswith(f"{name}=")]
        run(case(DENSE, "p4d", 4, 8, 512, rest, memory_gib=1.12))


def test_what_is_forbidden_conflicts_too() -> None:
    """At 1.1 GiB a GPU some recomputing is needed; zero=1 does not matter."""
    it = case(DENSE, "p4d", 4, 8, 512, ["sp=off", *PLAIN], memory_gib=1.12)
    again = ("selective", "full", *map(str, range(1, DENSE.layers)))
    it = replace(it, space=replace(it.space, forbid={"zero": ("1",), "recompute": again}))
    with pytest.raises(NothingFitsError):
        run(it)
    first, *changes = explain(it.problem, it.space).splitlines()
    said = f"--forbid recompute={','.join(again)}"
    assert first == f"these conflict: {said}, --gpus 4, --seq-len 512, 1.1 GiB a GPU"
    assert changes[0].startswith(f"would fit: without {said}: ")
    run(replace(it, space=replace(it.space, forbid={"zero": ("1",)})))


def test_more_gpus_or_a_shorter_sequence() -> None:
    it = case(DENSE, "p4d", 1, 2, 4096, memory_gib=1.25)
    with pytest.raises(NothingFitsError):
        run(it)
    lines = explain(it.problem, it.space).splitlines()[1:]
    assert lines
    for line in lines:
        match = re.match(r"would fit: --(gpus|seq-len) (\d+): ", line)
        assert match is not None, line
        gpus, seq_len = (int(match[2]), 4096) if match[1] == "gpus" else (1, int(match[2]))
        run(case(DENSE, "p4d", gpus, 2, seq_len, memory_gib=1.25))


def test_why_a_choice_lost() -> None:
    it = case(DENSE, "p4d", 4, 8, 512, ["recompute=none", "b=1,2", "sp=off", *PLAIN])
    best = search(it.problem, it.space, budget_s=1e6, workers=1, tune=False).best.score
    text = why_not(it.problem, it.space, "pp=4", best)
    match = re.fullmatch(r"pp=4 lost: the best with it, pp=4 .*, takes ([\d.]+) s a step, ([\d.]+)% more: .*", text)
    assert match is not None, text
    assert float(match[1]) > best.step_time_s
    assert "did not lose" in why_not(it.problem, it.space, "sp=off", best)
    with pytest.raises(ConfigError, match="--explain names no axis"):
        why_not(it.problem, it.space, "zzz=4", best)
    assert "lost: " in why_not(it.problem, it.space, "pp=3", best)
    without = replace(it.space, forbid={"pp": ("2", "4")})
    assert why_not(it.problem, without, "pp=4", best) == "pp=4 lost: --forbid pp=2,4 rules it out"
    assert "rules it out" not in why_not(it.problem, without, "pp=1,4", best)
