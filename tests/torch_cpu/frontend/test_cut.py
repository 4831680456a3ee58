"""Laws of the cut: every call in one phase, BI and BW apart, nothing saved that need not be."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from piper_core.frontend.capture import capture
from piper_core.frontend.cut import Cut, cut, is_view, tensors
from piper_core.frontend.operations import weight_of
from piper_core.frontend.recompute import kept
from piper_core.models import build_model
from piper_core.names import Recompute, Region
from tests.torch_cpu.models.tiny import TINY, tokens


@cache
def cut_of(name: str) -> Cut:
    x = tokens()
    return cut(capture(build_model(TINY[name], layers=2), (x, x)))


@pytest.mark.parametrize("name", TINY)
def test_laws(name: str) -> None:
    made = cut_of(name)
    joint = made.joint
    for index, piece in enumerate(made.pieces):
        first, second = set(piece.backward_input.calls), set(piece.backward_weight.calls)
        assert first | second == set(piece.backward.calls)
        assert all(is_view(node) and weight_of(node) is not None for node in first & second)
        assert {name for name, _ in piece.gradients} == set(piece.parameters)
        fixed = {*joint.parameters, *joint.buffers, *(n.name for n in made.prelude.outputs)}
        assert {n.name for n in piece.saved} <= {n.name for n in (*piece.forward.outputs, *piece.forward.inputs)}
        assert not {n.name for n in piece.saved} & fixed
        for earlier in made.pieces[:index]:  # forwards go one way, backwards the other
            assert not set(piece.sent) & set(earlier.received)
    regions = [piece.site.region for piece in made.pieces]
    assert regions[0] is Region.EMBED
    assert regions[-1] is Region.HEAD


@pytest.mark.parametrize("name", TINY)
def test_one_gradient_comes_back_for_each_layer(name: str) -> None:
    """What leaves the backward of a layer is the gradient of what came in: one hidden-state tensor."""
    made = cut_of(name)
    attention = [piece for piece in made.pieces if piece.site.region is Region.ATTENTION]
    for piece in attention:
        inside = set(piece.backward.calls)
        leaving = [n for n in piece.backward.outputs if any(u not in inside and u.op != "output" for u in n.users)]
        assert [n.meta["val"].shape for n in leaving] == [n.meta["val"].shape for n in piece.received]


@pytest.mark.parametrize("name", ["llama", "gpt", "mixtral"])
def test_equal_layers_have_equal_graphs(name: str) -> None:
    made = cut_of(name)
    by_layer = [[p for p in made.pieces if p.site.layer == layer] for layer in (0, 1)]
    for first, second in zip(*by_layer, strict=True):
        for phase in ("forward", "backward", "backward_input", "backward_weight"):
            assert getattr(first, phase).digest() == getattr(second, phase).digest()
    digests = {piece.forward.digest() for piece in by_layer[0]}
    assert len(digests) == len(by_layer[0])


@pytest.mark.parametrize("name", TINY)
def test_what_is_saved_is_what_autograd_saves(name: str) -> None:
    """Against saved_tensors_hooks on the same model: unique storages, without parameters, buffers and rotary tables."""
    model, x = build_model(TINY[name], layers=2), tokens()
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, x)
    made = cut_of(name)
    fixed = [*model.parameters(), *model.buffers()]
    for tensor in fixed:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    ours = {}
    for piece in made.pieces:
        for node in piece.saved:
            ours.update((t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors(node))
    prelude = sum(t.untyped_storage().nbytes() for n in made.prelude.outputs for t in tensors(n))
    # tokens and targets, which are one tensor here, and scalars that autograd keeps for its own use
    assert sum(ours.values()) + prelude == pytest.approx(sum(saved.values()), abs=2 * 8 * x.numel() + 512)
    assert loss.dim() == 0


@pytest.mark.parametrize("name", TINY)
def test_recompute_keeps_less_and_less(name: str) -> None:
    for piece in cut_of(name).pieces:
        sizes = []
        for policy in Recompute:
            stay = kept(piece, policy)
            again = piece.recompute(stay)
            nodes = {*stay, *(n for n in (*piece.saved, *again.inputs) if n in piece.received)}
            found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for n in nodes for t in tensors(n)}
            sizes.append(sum(found.values()))
        assert sizes == sorted(sizes, reverse=True), str(piece.site)


def test_selective_recompute_does_no_products_again() -> None:
    for piece in cut_of("llama").pieces:
        again = piece.recompute(kept(piece, Recompute.SELECTIVE))
        assert not [n for n in again.calls if str(n.target) in ("aten.mm.default", "aten.addmm.default")]
        assert not [n for n in again.calls if "attention" in str(n.target)]
