"""Boxes of a run of elements; a folder of checkpoints is whole at every moment."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_core.errors import ConfigError
from piper_core.runtime.checkpoint import LATEST, begin, boxes, commit, find

ABOUT = {"model": "llama", "optimizer": "AdamW"}
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_run_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(1, numel - start))
    whole = torch.arange(numel).view(shape)
    found: list[int] = []
    made = list(boxes(shape, start, count))
    for offsets, sizes, before in made:
        assert before == len(found)
        box = whole[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == list(range(start, start + count))
    assert len(made) <= 2 * len(shape) - 1


def test_a_new_checkpoint_takes_the_place_of_the_old_one_at_once(tmp_path: Path) -> None:
    first = commit(begin(tmp_path, 1), ABOUT | {"steps": 1})
    part = begin(tmp_path, 2)  # a kill here leaves the old one
    (part / "half").write_text("x")
    assert find(tmp_path, ABOUT) == (first, 1)
    second = commit(part, ABOUT | {"steps": 2})
    assert find(tmp_path, ABOUT) == (second, 2)
    assert not first.exists()
    again = commit(begin(tmp_path, 2), ABOUT | {"steps": 2})
    assert find(tmp_path, ABOUT) == (again, 2)
    assert {path.name for path in tmp_path.iterdir()} == {LATEST, again.name}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        find(tmp_path, ABOUT)
    commit(begin(tmp_path, 3), ABOUT | {"steps": 3})
    with pytest.raises(ConfigError, match="is of model llama, this run has moe"):
        find(tmp_path, ABOUT | {"model": "moe"})
    (tmp_path / LATEST).write_text("step-9")
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        find(tmp_path, ABOUT)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a checkpoint"):
        begin(tmp_path / "file", 1)
