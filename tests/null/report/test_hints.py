"""Hints about numbers that hold a search back."""

from __future__ import annotations

import pytest

from piper_core.arch import preset
from search.report.hints import hints
from search.space import Space


def space(gpus: int, batch: int, **fix: tuple[str, ...]) -> Space:
    return Space(preset("piper-1b"), gpus, 8, batch, 1024, fix)


@pytest.mark.parametrize(
    ("gpus", "batch", "words"),
    [
        (
            100,
            512,
            "4 at most, since it must divide the global batch 512; a batch of 500 or 600 would allow dp up to 100",
        ),
        (64, 48, "16 at most, since it must divide the global batch 48; a batch of 64 would allow dp up to 64"),
    ],
)
def test_a_batch_that_limits_dp(gpus: int, batch: int, words: str) -> None:
    assert hints(space(gpus, batch)) == [f"dp is {words}"]


def test_no_hint_where_none_is_needed() -> None:
    assert hints(space(32, 512)) == []
    assert hints(space(100, 512, dp=("4",))) == []
