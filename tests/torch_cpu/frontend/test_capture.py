"""The capture: what it relies on in torch's private modules, and forwards that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piper_core.errors import ConfigError
from piper_core.frontend.capture import boxed, capture, fake
from piper_core.frontend.cut import cut
from tests.torch_cpu.frontend.small import Failing, Plain, Shared


def test_placeholders_and_gradients_are_named() -> None:
    """Relies on the descriptors of aot_export_joint_with_descriptors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    joint = capture(model, (torch.randn(2, 4, requires_grad=True),))
    assert sorted(joint.parameters.values()) == sorted(name for name, _ in model.named_parameters())
    assert {"1.running_mean", "1.running_var"} <= set(joint.buffers.values())
    assert len(joint.tangents) == len(joint.outputs) == 1
    assert [joint.parameters.get(name, name) for name, _ in joint.gradients][-1] == joint.inputs[0]


def test_nodes_say_which_pass_they_belong_to() -> None:
    """Relies on meta["partitioner_tag"], and on the backward having the seq_nr of its forward."""
    joint = capture(Plain(), (torch.randn(2, 4),))
    calls = [node for node in joint.nodes if node.op == "call_function"]
    backward = [node for node in calls if node.meta["partitioner_tag"] == "is_backward"]
    assert 0 < len(backward) < len(calls)
    forward = {node.meta["seq_nr"] for node in calls if node not in backward}
    assert all(node.meta["seq_nr"] in forward for node in backward if node.meta.get("custom"))


def test_gradient_accumulation_carries_no_annotation() -> None:
    joint = capture(Plain(), (torch.randn(2, 4),))
    loose = [n for n in joint.nodes if n.op == "call_function" and not n.meta.get("custom")]
    assert loose
    assert {str(n.target) for n in loose} == {"aten.add.Tensor"}


def test_attention_is_one_operation_on_fake_cpu_tensors() -> None:
    """Relies on FakeTensorMode with the device cpu; on meta, attention is cut into its parts."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    with fake():
        joint = capture(Attention(), (torch.empty(2, 16, 8),))
    names = [str(node.target) for node in joint.nodes]
    assert sum("flash_attention_for_cpu" in name for name in names) == 2


def test_views_share_their_storage() -> None:
    """Relies on the fake tensors of meta["val"] being views where the calls are."""
    piece = cut(capture(Plain(), (torch.randn(2, 4),))).pieces[0]
    weight = next(n for n in piece.forward.calls if str(n.target) == "aten.t.default")
    source = weight.all_input_nodes[0]
    assert weight.meta["val"].untyped_storage()._cdata == source.meta["val"].untyped_storage()._cdata


def test_a_boxed_function_lets_go_of_its_inputs() -> None:
    """Relies on torch.fx.graph._BoxedCodeGen."""
    made = cut(capture(Plain(), (torch.randn(2, 4),)))
    graph = made.pieces[-1].forward
    values = [torch.ones(node.meta["val"].shape) for node in graph.inputs]
    boxed(graph.module(made.joint.module))(values)
    assert values == []


def test_nothing_is_computed_and_nothing_changes() -> None:
    model = Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, (torch.full((2, 4), torch.nan),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_parameters_used_by_several_parts_have_a_gradient_from_each() -> None:
    made = cut(capture(Shared(), (torch.randn(3, 6),)))
    assert [len(piece.gradients) for piece in made.pieces] == [1, 1]


def asks(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def counts(x: Tensor) -> Tensor:
    return x[x > 0]


def breaks(x: Tensor) -> Tensor:
    return x @ torch.ones(5, 5)


@pytest.mark.parametrize(
    ("how", "line", "what"),
    [
        (asks, "return x if x.sum() > 0 else -x", "needs the value of a tensor .*torch.where"),
        (counts, "return x[x > 0]", "needs the value of a tensor"),
        (breaks, "return x @ torch.ones(5, 5)", "fails: RuntimeError"),
    ],
)
def test_a_forward_that_cannot_be_traced_is_named_by_its_line(
    how: Callable[[Tensor], Tensor], line: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        capture(Failing(how), (torch.randn(2, 4),))
    assert f"test_capture.py:{how.__code__.co_firstlineno + 1} ({line})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forward_that_writes_into_a_buffer_is_refused() -> None:
    model = Failing(lambda x: x)
    model.how = lambda x: x + model.seen.add_(1)
    with pytest.raises(ConfigError, match="writes into"):
        capture(model, (torch.randn(2, 4),))
