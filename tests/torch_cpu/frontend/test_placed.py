"""Graphs for a GPU, where there is none: devices and shapes by fake tensors, what stands for kernels by numbers.

That the kernels of CUDA take what they are given is not shown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_core.frontend import placed
from piper_core.frontend.capture import boxed, capture
from piper_core.frontend.cut import ChunkGraph, Cut, cut, tensors
from piper_core.models import build_model
from tests.torch_cpu.models.tiny import TINY, tokens

SHIFT = torch.tensor([1.0, 2.0])


def graphs(made: Cut) -> list[ChunkGraph]:
    pieces = made.pieces
    return [made.prelude, *(p.forward for p in pieces), *(p.backward for p in pieces)]


def moved(given: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="cuda") for t in given]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float32),
        ("gemma2", torch.float32),
        ("qwen3-moe", torch.bfloat16),
        ("deepseek", torch.bfloat16),
        ("gpt", torch.float32),
    ],
)
def test_every_tensor_of_every_graph_is_on_the_device(name: str, dtype: torch.dtype) -> None:
    """A call whose operands lie on two devices, or that has no kernel there, raises."""
    model, x = build_model(TINY[name], layers=2, dtype=dtype), tokens()
    made = cut(capture(model, (x, x)))
    for graph in graphs(made):
        call = boxed(graph.module(made.joint.module, device="cuda"))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            found = call(moved([tensors(node)[0] for node in graph.inputs]))
        assert len(found) == len(graph.outputs)
        for node, value in zip(graph.outputs, found, strict=True):
            (like,) = tensors(node)
            assert (value.device.type, value.shape, value.dtype) == ("cuda", like.shape, like.dtype), node


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_is_written_out_is_the_kernel_of_the_cpu(causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    q, gradient = torch.randn(2, 2, 4, 16, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 2, 2 if not masked else 4, 16, 8, dtype=torch.float64).unbind()
    mask = torch.randn(16, 16, dtype=torch.float64).expand(2, 4, 16, 16) if masked else None
    kernels = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    wanted = kernels[0](q, k, v, 0.0, causal, attn_mask=mask)
    found = placed.attention(q, k, v, 0.0, causal, attn_mask=mask, strides=[each.stride() for each in wanted])
    torch.testing.assert_close(found, wanted, check_stride=True)
    rest = (gradient, q, k, v, *wanted, 0.0, causal)
    wanted = kernels[1](*rest, attn_mask=mask)
    found = placed.attention_backward(*rest, attn_mask=mask, strides=[each.stride() for each in wanted])
    torch.testing.assert_close(found, wanted, check_stride=True)


def test_constants_are_moved_and_the_cpu_is_left_alone() -> None:
    class Shifted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + SHIFT

    made = cut(capture(Shifted(2, 2), (torch.randn(3, 2),)))
    (piece,) = made.pieces

    plain = piece.forward.module(made.joint.module, device="cpu")
    assert str(plain.graph) == str(piece.forward.graph())
    there = piece.forward.module(made.joint.module, device="cuda").graph
    constants = [node for node in there.nodes if node.op == "get_attr"]
    assert constants
    for node in constants:
        (user,) = node.users
        assert (user.op, user.target, user.args[1]) == ("call_method", "to", torch.device("cuda"))
