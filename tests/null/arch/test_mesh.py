"""Meshes: groups partition the ranks, text parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_core.errors import ConfigError
from piper_core.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(tuple(zip(("pp", "dp", "cp", "tp"), sizes, strict=False)))
)


def test_the_last_axis_is_the_fastest() -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=2")
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("pp", "tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups() == tuple((rank,) for rank in range(8))
    assert (mesh.size, mesh.degree("dp"), mesh.degree("ep")) == (8, 2, 1)


@given(meshes, st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))
    groups = mesh.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert groups == tuple(sorted(groups))
    fixed = [index for index, name in enumerate(mesh.names) if name not in names]
    for group in groups:
        assert list(group) == sorted(group)
        assert len({tuple(mesh.coordinates(rank)[i] for i in fixed) for rank in group}) == 1


@given(meshes)
def test_text_and_coordinates_parse_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@pytest.mark.parametrize("text", ["", "pp", "pp=0", "pp=2,pp=2", "pp=2;dp=2", "pp=-1", "=3", "pp=2,"])
def test_text_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Mesh.parse(text)


def test_what_is_not_in_the_mesh_is_refused() -> None:
    mesh = Mesh.parse("pp=2,tp=2")
    for wrong in (
        lambda: mesh.groups("dp"),
        lambda: mesh.coordinates(4),
        lambda: mesh.rank((0, 2)),
        lambda: mesh.rank((0,)),
    ):
        with pytest.raises(ConfigError):
            wrong()
