"""Mixtures of experts: routing, dropless computing, balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from piper_core.arch import Architecture
from piper_core.models import build_block, build_model, counting, set_loss_weight, update_balance
from piper_core.models.grouped import grouped_linear, grouped_outer
from piper_core.models.moe import Moe, with_loss
from tests.torch_cpu.models.tiny import TINY, tokens

MIXTURES = [name for name, architecture in TINY.items() if architecture.experts]


def moe_of(architecture: Architecture, **options: Any) -> Moe:
    torch.manual_seed(0)
    moe = build_block(architecture, 2, dtype=torch.float64, **options).moe
    with torch.no_grad():  # far enough from ties, and large enough to see
        moe.router.scores.weight.copy_(torch.randn_like(moe.router.scores.weight))
    return moe


def inputs(batch: int = 2, seq: int = 16) -> Tensor:
    return torch.randn(batch, seq, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_definition(moe: Moe, x: Tensor) -> Tensor:
    """Each token by itself, each of its experts by itself."""
    arch, experts = moe.router.architecture, moe.experts
    out = []
    for token, h in zip(x.flatten(0, 1), moe.router.norm(x).flatten(0, 1), strict=True):
        logits = moe.router.scores(h)
        scores = logits.sigmoid() if arch.balance == "bias" else logits.softmax(-1)
        wanted = (scores + moe.router.bias if arch.balance == "bias" else scores).detach()
        allowed = set(range(arch.experts))
        if arch.expert_groups:
            groups = wanted.view(arch.expert_groups, -1)
            worth = [float(group.topk(2).values.sum()) for group in groups]
            best = sorted(range(len(worth)), key=lambda g: (-worth[g], g))[: arch.top_groups]
            allowed = {g * groups.shape[1] + i for g in best for i in range(groups.shape[1])}
        chosen = sorted(allowed, key=lambda e: (-float(wanted[e]), e))[: arch.top_k]
        total = scores[chosen].sum() if arch.normalise_top_k else 1.0
        y = token if moe.shared is None else token + moe.shared(h)
        for e in chosen:
            up = _linear(experts.up, e, h)
            inner = experts.act(up) if experts.gate is None else experts.act(_linear(experts.gate, e, h)) * up
            y = y + arch.routed_scale * scores[e] / total * _linear(experts.down, e, inner)
        out.append(y)
    return torch.stack(out).view_as(x)


def _linear(layer: Any, expert: int, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight[expert], None if layer.bias is None else layer.bias[expert])


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_mixture_is_what_its_definition_says(name: str, normalise: bool) -> None:
    moe, x = moe_of(replace(TINY[name], balance_loss=0.0, normalise_top_k=normalise)), inputs().requires_grad_()
    ours, wanted = moe(x), by_definition(moe, x)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    over = [x, *(p for p in moe.parameters())]
    seed = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, over, seed), torch.autograd.grad(wanted, over, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_rows_are_sorted_copies_and_nothing_is_dropped() -> None:
    moe, x = moe_of(TINY["mixtral"]), inputs()
    routed = moe.router(x)
    assert int(routed.counts.sum()) == len(routed.rows) == 32 * 3
    copies = moe.router.norm(x).flatten(0, 1).repeat_interleave(3, 0)
    assert torch.equal(routed.rows[routed.places], copies)
    assert sorted(routed.places.tolist()) == list(range(96))


def test_all_tokens_on_the_same_experts_and_none_on_the_rest() -> None:
    moe, x = moe_of(TINY["mixtral"]), inputs()
    with torch.no_grad():
        moe.router.scores.weight.zero_()  # ties: the lowest indices win
    routed = moe.router(x)
    assert routed.counts.tolist() == [32, 32, 32, 0, 0, 0, 0, 0]
    out = moe(x)
    torch.testing.assert_close(out, by_definition(moe, x))
    out.sum().backward()
    gradient = moe.experts.up.weight.grad
    assert gradient is not None
    assert gradient[:3].abs().sum((1, 2)).gt(0).all()
    assert not gradient[3:].any()


def test_every_token_on_one_expert() -> None:
    architecture = replace(TINY["mixtral"], top_k=1)
    moe, x = moe_of(architecture), inputs()
    with torch.no_grad():
        moe.router.scores.weight.zero_()
        moe.router.norm.weight.fill_(0.0)
    assert moe.router(x).counts.tolist() == [32] + [0] * 7
    torch.testing.assert_close(moe(x), by_definition(moe, x))


def test_balanced_routing_gives_every_expert_its_share() -> None:
    moe = moe_of(TINY["mixtral"], routing="balanced")
    assert moe.router(inputs()).counts.tolist() == [12] * 8
    assert moe.router(inputs(1, 5)).counts.tolist() == [2] * 7 + [1]
    moe(inputs()).sum().backward()
    assert all(p.grad is not None for p in moe.parameters())


# --- balance by a loss ---


def test_the_auxiliary_loss_reaches_gradients_and_not_the_loss() -> None:
    x, arch = tokens(), TINY["mixtral"]
    gradients = []
    for coefficient, weight in ((0.0, 1.0), (0.5, 1.0), (0.5, 3.0)):
        model = build_model(replace(arch, balance_loss=coefficient), dtype=torch.float64)
        set_loss_weight(model, weight)
        loss = model(x, x)
        loss.backward()
        gradients.append((loss.item(), model.layers[2].moe.router.scores.weight.grad))
    (plain, none), (one, once), (three, thrice) = gradients
    assert plain == one == three
    torch.testing.assert_close(thrice - none, 3 * (once - none))
    assert (once - none).abs().max() > 1e-6


def test_the_auxiliary_loss_is_that_of_the_switch_transformer() -> None:
    moe, x = moe_of(replace(TINY["mixtral"], balance_loss=0.25)), inputs()
    moe.router(x).weights.sum().backward()  # weights add up to 1, so that all there is comes from the auxiliary loss
    ours = moe.router.scores.weight.grad
    probabilities = moe.router.scores(moe.router.norm(x).flatten(0, 1)).softmax(-1)
    share = moe.router(x).counts.double() / 96
    loss = 0.25 * 8 * (share * probabilities.mean(0)).sum()
    (wanted,) = torch.autograd.grad(loss, moe.router.scores.weight)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)


# --- balance by a bias ---


def test_a_bias_decides_who_is_picked_and_not_what_it_weighs() -> None:
    moe, x = moe_of(replace(TINY["deepseek"], expert_groups=0, top_groups=0)), inputs()
    before = moe.router(x)
    moe.router.bias[5] = 10.0
    after = moe.router(x)
    assert int(after.counts[5]) == 32 > int(before.counts[5])
    assert after.weights.max() <= TINY["deepseek"].routed_scale
    torch.testing.assert_close(after.weights.sum(-1), torch.full((32,), 2.5, dtype=torch.float64))


def test_biases_move_towards_experts_with_fewer_tokens() -> None:
    model, x = build_model(TINY["deepseek"]), tokens()
    with counting(model) as counts:
        model(x)
        model(x)
    assert sorted(counts) == [1, 2]
    assert all(int(count.sum()) == 2 * 32 * 3 for count in counts.values())
    update_balance(model, counts, rate=0.01)
    for layer, count in counts.items():
        wanted = 0.01 * torch.sign(count.float().mean() - count.float())
        assert torch.equal(model.layers[layer].moe.router.bias, wanted)
    assert "layers.1.moe.router.bias" in model.state_dict()
    assert not hasattr(model.layers[1].moe.router, "loss_weight")
    model(x)
    assert all(int(count.sum()) == 192 for count in counts.values()), "counting ends with its block"


# --- operators ---


@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [12, 0, 0, 0], [0, 0, 0, 0]])
def test_grouped_products_are_products_of_groups(counts: list[int]) -> None:
    n = sum(counts)
    x, weight = torch.randn(n, 6, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    parts = [rows @ w.T for rows, w in zip(x.split(counts), weight, strict=True)]
    y = grouped_linear(x, weight, torch.tensor(counts))
    torch.testing.assert_close(y, torch.cat(parts))
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, torch.tensor(counts)), (x, weight))


def test_operators_keep_the_rules_of_operators() -> None:
    counts = torch.tensor([3, 0, 4, 5])
    x, weight = torch.randn(12, 6, requires_grad=True), torch.randn(4, 5, 6, requires_grad=True)
    torch.library.opcheck(grouped_linear, (x, weight, counts))
    torch.library.opcheck(grouped_outer, (torch.randn(12, 5), x.detach(), counts))
    torch.library.opcheck(with_loss, (x, torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)))
