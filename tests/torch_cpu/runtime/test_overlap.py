"""Collectives inside chunks: begun early, waited for late, and work in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import Graph, Node

from piper_core.arch.record import Architecture
from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, Region
from piper_core.runtime.graphs import Macros, Unit
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.overlap import _BEGIN, _finish
from tests.torch_cpu.runtime.cases import BIASED, LLAMA, SEQ

PRODUCTS = ("mm", "addmm", "addmm_", "linear", "grouped_linear", "grouped_outer")


def graph(
    architecture: Architecture, degrees: Degrees, region: Region, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> Graph:
    """Return the graph of one chunk's action as it is run."""
    found: list[Graph] = []
    monkeypatch.setattr("piper_core.runtime.graphs.boxed", lambda module: found.append(module.graph))
    macros = Macros(ArchitectureSource(replace(architecture, layers=1), 1, SEQ, degrees).cut)
    (piece,) = (i for i, each in enumerate(macros.cut.pieces) if each.site.region is region)
    spec = (Unit(piece, phase),)
    macros.macro(spec, {node.name for node in macros.draft(spec).outputs}, frozenset())
    return found[0]


def products(nodes: list[Node]) -> int:
    names = [str(getattr(node.target, "__name__", node.target)).split(".")[0] for node in nodes]
    return sum(name in PRODUCTS for name in names)


@pytest.mark.parametrize(
    ("architecture", "degrees", "region", "phase", "behind"),
    [
        (LLAMA, Degrees(tensor=2), Region.MLP, Phase.B, [3]),  # three gradients of weights behind the input's
        (LLAMA, Degrees(tensor=2, sequence=True), Region.ATTENTION, Phase.B, [0, 5, 4]),  # gradient, x, its gradient
        (BIASED, Degrees(expert=2), Region.EXPERT, Phase.F, [0, 2, 0]),  # counts; tokens there; and back
        (BIASED, Degrees(expert=2), Region.EXPERT, Phase.B, [6, 3]),  # gradients there, and back
    ],
)  # fmt: skip
def test_what_runs_behind_each_collective(
    architecture: Architecture, degrees: Degrees, region: Region, phase: Phase, behind: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    nodes = list(graph(architecture, degrees, region, phase, monkeypatch).nodes)
    place = {node: i for i, node in enumerate(nodes)}
    begun = [node for node in nodes if node.target in _BEGIN.values()]
    assert not any(node.target in _BEGIN for node in nodes)
    found = []
    for node in begun:
        (end,) = node.users
        assert end.target is _finish
        found.append(products(nodes[place[node] : place[end]]))
    assert found == behind
