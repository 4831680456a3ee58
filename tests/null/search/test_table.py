"""What a search prints: nothing cut, nothing said twice alike, differences that add up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from search.candidate import Score
from search.engine import Candidate, Result
from search.report.table import COLUMNS, FIRST_TO_GO, candidates_table, headline, summary
from search.space import Configuration, Space
from tests.null.search.spaces import DENSE

CONFIG = Configuration(2, 2, 8, 1, "interleaved_1f1b", 4, 2, 2, 16, "none", False, "balanced")


def candidate(config: Configuration = CONFIG, step: float = 15.755, **breakdown: float) -> Candidate:
    score = Score(step, 4160.2, 240.0, 0.767, (79e9, 70e9), 5.4 * 2**30, "yes", 0.005, {"gather": 0.084},
                  breakdown or {"compute": step})  # fmt: skip
    return Candidate(config, (5, 5), score)


def result(*candidates: Candidate, **fields: object) -> Result:
    return Result(list(candidates), 100, {"time bound": 90}, 10, proof_gap=0.0, stopped="budget", **fields)  # type: ignore[arg-type]  # any field


def test_every_column_but_two_may_go() -> None:
    assert {*FIRST_TO_GO, "#", "step s"} == set(COLUMNS)
    assert len(FIRST_TO_GO) == len(COLUMNS) - 2


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 100, 120, 145, 200, None])
def test_whole_columns_go_until_the_table_fits(width: int | None) -> None:
    rows = [candidate(), candidate(replace(CONFIG, num_microbatches=1024, schedule="1f1b"), 1234.5)]
    whole = [re.split(" {2,}", line.strip()) for line in candidates_table(rows)[0].splitlines()]
    text, left_out = candidates_table(rows, width)
    assert left_out == list(FIRST_TO_GO[: len(left_out)])
    kept = [i for i, name in enumerate(COLUMNS) if name not in left_out]
    shown = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    assert shown == [[line[i] for i in kept] for line in whole]
    assert width is None or width < 20 or max(map(len, text.splitlines())) <= width
    if width in (None, 200):
        assert not left_out
        assert tuple(whole[0]) == COLUMNS
    elif width == 100:
        assert left_out == list(FIRST_TO_GO[:7])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequence_parallel": True}, "sequence parallelism on"),
        ({"cuts": "even"}, "cuts even"),
        ({"cuts": "even", "sequence_parallel": True}, "sequence parallelism on cuts even"),
        ({"recompute": "full"}, "microbatch 2 recompute"),
        ({"zero": 3}, "ZeRO-3"),
        ({"recompute": "selective"}, "selective recompute"),
        ({"recompute": "4"}, "recompute 4 a stage"),
        ({"cp": 2}, "CP2"),
        ({"order": "list"}, "list-scheduled"),
        ({"bucket": 4}, "bucket 4"),
        ({"streams": "data", "outer": "dp"}, "dp outer, streams data"),
    ],
)
def test_no_two_strategies_read_alike(change: dict[str, object], words: str) -> None:
    other = candidate(replace(CONFIG, **change), 16.0, compute=16.0)  # type: ignore[arg-type]  # any field
    text = headline(result(candidate(), other))
    first, second = text.split(" wins: ")[0], text.split("the runner-up, ")[1].split(", is ")[0]
    assert first != second
    assert words in second
    lines = candidates_table([candidate(), other])[0].splitlines()[1:]
    assert lines[0].split()[1:17] != lines[1].split()[1:17]


@pytest.mark.parametrize(
    ("best", "other", "words"),
    [
        ({"compute": 10.0}, {"compute": 10.5}, "5.0% slower, by 0.500 s: +0.500 s compute."),
        (
            {"compute": 9.0, "waiting": 1.0},
            {"compute": 8.0, "waiting": 2.5, "gather": 0.0001},
            "5.0% slower, by 0.500 s: +1.500 s waiting, -1.000 s compute.",
        ),
        (
            {"compute": 10.0},
            {"compute": 10.25, "waiting": 0.26, "gather": 0.4, "data_reduce": 0.1, "update": 0.24},
            "12.5% slower, by 1.25 s: +0.40 s gather, +0.26 s waiting, +0.25 s compute, +0.34 s the rest.",
        ),
        ({"compute": 0.01}, {"compute": 0.01012}, "1.2% slower, by 0.000120 s: +0.000120 s compute."),
        ({"compute": 10.0}, {"compute": 10.009}, "is within 0.1%."),
        ({"compute": 10.0}, {"compute": 10.0}, "takes as long and stands second by its name alone."),
    ],
)
def test_the_differences_add_up(best: dict[str, float], other: dict[str, float], words: str) -> None:
    first = candidate(CONFIG, sum(best.values()), **best)
    second = candidate(replace(CONFIG, zero=3), sum(other.values()), **other)
    text = headline(result(first, second))
    assert text.endswith(words)
    assert not re.search(r"[+-]0\.0+ s", text)


@pytest.mark.parametrize(("step", "words"), [(15.755, "15.755"), (0.003715432, "0.003715"), (1.0, "1.000")])
def test_a_step_has_four_digits(step: float, words: str) -> None:
    one = candidate(CONFIG, step)
    assert f" wins: {words} s a step" in headline(result(one))
    assert words in candidates_table([one])[0].split()


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (99.0, "0 %: rows 1 to 3 are proved; "),
        (2.5, "0 %: rows 1 to 2 are proved, row 3 is the best found; "),
        (1.0, "0 %: row 1 is proved, rows 2 to 3 are the best found; "),
        (0.9, "10.00%: rows 1 to 3 are the best found; "),
    ],
)
def test_which_rows_are_proved(left: float, words: str) -> None:
    rows = [candidate(replace(CONFIG, zero=zero), float(zero)) for zero in (1, 2, 3)]
    made = result(*rows, least_left_s=left)
    made.proof_gap, made.family_gap = 0.25, max(0.0, 1.0 - left)
    text = "\n".join(summary(made, Space(DENSE, 8, 8, 16, 256, {}), 10))
    gap, _, which = words.partition(": ")
    over = "25.00% over every order, bucket, prefetch and stream"
    said = f"proof gap under these costs: {over}; {gap} with those of the schedules' families, where {which}"
    assert f"{said}stopped after 0.0 s (time budget spent)" in text
