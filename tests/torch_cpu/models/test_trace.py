"""Models are traced whole: no graph break, no size that depends on data, attention one operator."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from piper_core.arch import Architecture, preset
from piper_core.models import build_model
from tests.torch_cpu.models.tiny import TINY, tokens


@pytest.mark.parametrize("architecture", TINY.values(), ids=list(TINY))
def test_forward_and_backward_are_one_graph(architecture: Architecture) -> None:
    model, x = build_model(architecture, layers=2), tokens()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def step(
        parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor
    ) -> list[torch.Tensor]:
        leaves = {name: value.requires_grad_() for name, value in parameters.items()}
        loss = functional_call(model, {**leaves, **buffers}, (x, x))
        return [loss, *torch.autograd.grad(loss, list(leaves.values()))]

    graph = make_fx(step, tracing_mode="fake")(parameters, buffers, x)
    calls = (node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    found = Counter(call._schema.name.split("::")[1] for call in calls)
    assert found["_scaled_dot_product_flash_attention_for_cpu"] == 2
    assert found["_scaled_dot_product_flash_attention_for_cpu_backward"] == 2
    assert architecture.experts or "_softmax" not in found
    mixtures = sum(architecture.is_moe(layer) for layer in range(2))
    products = 3 if architecture.gated else 2
    assert found["grouped_linear"] == 2 * products * mixtures
    assert found["grouped_outer"] == products * mixtures
    given = parameters, buffers, x
    for ours, theirs in zip(graph(*given), step(*given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_large_models_are_built_under_a_fake_mode() -> None:
    with FakeTensorMode():
        model = build_model(preset("deepseek-v3"), layers=4, dtype=torch.bfloat16)
        x = torch.zeros(1, 256, dtype=torch.int64)
        loss = model(x, x)
    assert model.layers[3].moe.experts.up.weight.shape == (256, 2048, 7168)
    assert loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_compiled_whole(name: str) -> None:
    model, x = build_model(TINY[name]), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x), model(x, x))
