"""Boxes of a run of elements; a folder of checkpoints is whole at every moment."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

from piper_core.errors import ConfigError
from piper_core.runtime.checkpoint import LATEST, begin, boxes, check_parts, commit, find

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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes it
def test_a_checkpoint_that_lacks_parts(tmp_path: Path) -> None:
    """Whole it is taken; without a file, with less of one, and with a damaged or no list of parts it is refused."""

    def fresh(name: str) -> Path:
        save({"weight": torch.arange(1000.0)}, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    check_parts(fresh("whole"))
    short, without, damaged = fresh("short"), fresh("without"), fresh("damaged")
    (part,) = short.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"is broken: {part.name} holds [\d,]+ bytes of [\d,]+; load another"):
        check_parts(short)
    (without / part.name).unlink()
    with pytest.raises(ConfigError, match=f"is broken: {part.name} is missing"):
        check_parts(without)
    for content in (b"", b"noise", (damaged / ".metadata").read_bytes()[:-40]):
        (damaged / ".metadata").write_bytes(content)
        with pytest.raises(ConfigError, match="is broken: its list of parts cannot be read"):
            check_parts(damaged)
    (damaged / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"its list of parts cannot be read \(FileNotFoundError\)"):
        check_parts(damaged)
