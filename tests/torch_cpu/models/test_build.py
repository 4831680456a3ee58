"""Models as a whole: parameters as in the closed form, losses, gradients, seeds, pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from piper_core.arch import PRESETS, Architecture, model_chunks, preset
from piper_core.errors import ConfigError
from piper_core.models import build_block, build_embed, build_head, build_model
from tests.torch_cpu.models.tiny import TINY, tokens

each_architecture = pytest.mark.parametrize("architecture", TINY.values(), ids=list(TINY))


def closed_form(architecture: Architecture) -> dict[str, int]:
    table = model_chunks(architecture, 16)
    return {parameter.name: parameter.numel for chunk in table.chunks for parameter in chunk.parameters}


def counts(model: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_a_preset_are_those_of_its_closed_form(name: str) -> None:
    model = build_model(preset(name), device="meta", dtype=torch.bfloat16)
    assert counts(model) == closed_form(preset(name))
    assert sum(p.numel() for p in model.parameters()) == model_chunks(preset(name), 16).parameters
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


@each_architecture
def test_parameters_are_those_of_the_closed_form(architecture: Architecture) -> None:
    assert counts(build_model(architecture)) == closed_form(architecture)


@each_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_is_finite_and_every_parameter_has_a_gradient(architecture: Architecture, dtype: torch.dtype) -> None:
    model, x = build_model(architecture, dtype=dtype), tokens()
    assert model(x).shape == (2, 16, 97)
    loss = model(x, x.roll(-1, 1))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert 3.5 < loss.item() < 6.0  # ln 97 is 4.6
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.dtype == dtype
        if ".bias" not in name or dtype == torch.float64:  # a key's bias has none but for rounding
            unused = ".experts." in name and parameter.ndim > 1  # an expert may have no token in two short sequences
            assert unused or parameter.grad.any() or name.endswith("k.bias"), name


@each_architecture
def test_later_tokens_change_nothing_before_them(architecture: Architecture) -> None:
    model, x = build_model(architecture, dtype=torch.float64), tokens(1)
    changed = x.clone()
    changed[0, 9:] = 5
    torch.testing.assert_close(model(x)[0, :9], model(changed)[0, :9], rtol=1e-9, atol=1e-12)
    assert not torch.equal(model(x)[0, 9:], model(changed)[0, 9:])


@each_architecture
def test_the_sequences_of_a_batch_do_not_meet(architecture: Architecture) -> None:
    model, x = build_model(architecture, dtype=torch.float64), tokens(3)
    apart = torch.cat([model(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(x), apart, rtol=1e-9, atol=1e-12)


@each_architecture
def test_weights_depend_on_seed_and_name_alone(architecture: Architecture) -> None:
    whole, part = build_model(architecture, seed=3), build_model(architecture, seed=3, layers=2)
    other, again = build_model(architecture, seed=4), build_model(architecture, seed=3, dtype=torch.float64)
    values, wide = whole.state_dict(), again.state_dict()
    for name, value in part.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert all(torch.equal(wide[name].to(values[name].dtype), values[name]) for name in values)
    assert not torch.equal(other.embed.tokens.weight, whole.embed.tokens.weight)
    assert not torch.equal(values["layers.0.attention.q.weight"], values["layers.1.attention.q.weight"])


@each_architecture
def test_pieces_are_those_of_the_whole(architecture: Architecture) -> None:
    whole, x = build_model(architecture, seed=1), tokens()
    embed, head = build_embed(architecture, seed=1), build_head(architecture, seed=1)
    y, rope = embed(x), whole.rope(16)
    for index in range(architecture.layers):
        block = build_block(architecture, index, seed=1)
        assert block.index == index
        assert hasattr(block, "moe") == architecture.is_moe(index) != hasattr(block, "mlp")
        y = block(y, rope)
    assert torch.equal(head(y, x), whole(x, x))


@each_architecture
def test_a_block_is_its_regions(architecture: Architecture) -> None:
    block, x = build_block(architecture, 2), torch.randn(2, 16, 32)
    rope = build_model(architecture, layers=1).rope(16)
    y = block.attention(x, rope)
    z = block.moe.experts(y, block.moe.router(y)) if architecture.is_moe(2) else block.mlp(y)
    assert torch.equal(block(x, rope), z)


def test_tied_embeddings_are_one_parameter() -> None:
    model, x = build_model(TINY["gpt"], dtype=torch.float64), tokens()
    assert model.head.projection.weight is model.embed.tokens.weight
    assert model.to(torch.float32).head.projection.weight is model.embed.tokens.weight
    apart = build_model(replace(TINY["gpt"], tied=False))
    apart.load_state_dict(model.state_dict())
    assert torch.equal(model(x), apart(x))
    for each in (model, apart):
        each(x, x).backward()
    both = apart.embed.tokens.weight.grad + apart.head.projection.weight.grad
    torch.testing.assert_close(model.embed.tokens.weight.grad, both)


def test_targets_of_minus_100_are_left_out() -> None:
    model, x = build_model(TINY["llama"]), tokens()
    masked = x.clone()
    masked[:, 8:] = -100
    loss = nn.functional.cross_entropy(model(x)[:, :8].flatten(0, 1), x[:, :8].flatten())
    torch.testing.assert_close(model(x, masked), loss)


def test_logits_are_capped() -> None:
    model = build_model(replace(TINY["gemma2"], logit_cap=0.01))
    assert model(tokens()).abs().max() <= 0.01


def test_layers_that_are_not_there() -> None:
    for layers in (0, 4):
        with pytest.raises(ConfigError, match="1 to 3 layers"):
            build_model(TINY["llama"], layers=layers)
    with pytest.raises(ConfigError, match="layers 0 to 2"):
        build_block(TINY["llama"], 3)
