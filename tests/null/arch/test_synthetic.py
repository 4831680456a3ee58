"""Synthetic models: every layer there, stages contiguous and even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_core.arch.synthetic import even_stages, synthetic
from piper_core.errors import ConfigError
from piper_core.names import Region


@pytest.mark.parametrize(("spec", "regions"), [("dense:30", 2), ("moe:30", 3)])
def test_thirty_layers_on_four_stages_are_thirty(spec: str, regions: int) -> None:
    table = synthetic(spec, 4)
    assert {chunk.layer for chunk in table.chunks} == set(range(-1, 31))
    assert len(table.chunks) == 30 * regions + 2
    stages = [dict(chunk.tags)["PP"] for chunk in table.chunks]
    assert stages == sorted(stages)
    attention = [dict(c.tags)["PP"] for c in table.chunks if c.region is Region.ATTENTION]
    assert [attention.count(stage) for stage in range(4)] == [8, 8, 7, 7]


def test_without_stages_there_are_no_pp_tags() -> None:
    assert all(chunk.tags == () for chunk in synthetic("dense:3").chunks)
    experts = [chunk.tags for chunk in synthetic("moe:2").chunks if chunk.region is Region.EXPERT]
    assert experts == [(("EP", 0),), (("EP", 1),)]


@given(st.integers(1, 200), st.data())
def test_even_stages_lose_nothing(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    of = even_stages(layers, stages)
    sizes = [of.count(stage) for stage in range(stages)]
    assert len(of) == layers
    assert of == sorted(of)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        ("dense", None),
        ("dense:0", None),
        ("sparse:3", None),
        ("dense:-3", None),
        ("dense:4", 5),
        ("moe:4", 0),
        ("", None),
    ],
)
def test_bad_specs_are_refused_in_a_line(spec: str, stages: int | None) -> None:
    with pytest.raises(ConfigError) as caught:
        synthetic(spec, stages)
    assert "\n" not in str(caught.value)
