"""Closed forms against the modules: FLOPs of matrix products and bytes kept, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from piper_core.arch import Architecture, model_chunks, preset
from piper_core.models import build_block
from piper_core.models.rotary import Rotary
from piper_core.names import Region

SEQ = 128
# shapes of the presets, narrower
NARROW = {
    "llama9b": replace(preset("llama9b"), hidden=512, ffn=1792, heads=4, kv_heads=1),
    "gpt2-xl": replace(preset("gpt2-xl"), hidden=512, ffn=2048, heads=8, kv_heads=8),
    "qwen3-8b": replace(preset("qwen3-8b"), hidden=512, ffn=1536, heads=4, kv_heads=1),
    "mixtral-8x7b": replace(preset("mixtral-8x7b"), hidden=512, expert_ffn=1792, heads=4, kv_heads=1),
    "deepseek-v3": replace(
        preset("deepseek-v3"), hidden=896, ffn=2304, expert_ffn=256, shared_ffn=256, heads=16, kv_heads=16, q_rank=192,
        kv_rank=64, experts=32,
    ),
    "gemma2": replace(
        preset("llama9b"), hidden=512, ffn=1792, heads=4, kv_heads=1, post_norm=True, activation="gelu_tanh"
    ),
}  # fmt: skip
CASES = [(name, layer) for name in NARROW for layer in ((0, 3) if name == "deepseek-v3" else (0,))]


def regions(architecture: Architecture, layer: int) -> list[tuple[Region, Callable[[Tensor], Tensor]]]:
    """Return the regions of a layer as functions of a hidden state, the router with the experts."""
    block = build_block(architecture, layer, dtype=torch.bfloat16)
    device, learned = torch.device("cpu"), architecture.learned_positions
    rope = None if learned else Rotary(architecture, device, torch.bfloat16)(SEQ)
    second = (Region.EXPERT, block.moe) if architecture.is_moe(layer) else (Region.MLP, block.mlp)
    return [(Region.ATTENTION, lambda x: block.attention(x, rope)), second]


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_matrix_products_are_those_of_the_closed_form(name: str, layer: int) -> None:
    architecture = NARROW[name]
    chunks = [chunk for chunk in model_chunks(architecture, SEQ).chunks if chunk.layer == layer]
    x = torch.randn(1, SEQ, architecture.hidden, dtype=torch.bfloat16, requires_grad=True)
    for region, forward in regions(architecture, layer):
        wanted = [c for c in chunks if c.region is region or (region is Region.EXPERT and c.region is Region.ROUTER)]
        with FlopCounterMode(display=False) as counter:
            y = forward(x)
        assert _matmuls(counter) == round(sum(c.forward.matmul_flops for c in wanted)), region
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        backward = sum(c.backward_input.matmul_flops + c.backward_weight.matmul_flops for c in wanted)
        assert _matmuls(counter) == round(backward), region


def _matmuls(counter: FlopCounterMode) -> int:
    found = counter.get_flop_counts()["Global"]
    return sum(flops for operator, flops in found.items() if "attention" not in str(operator))


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_bytes_kept_are_those_of_the_closed_form(name: str, layer: int) -> None:
    """Distinct storages that autograd saves, parameters and rotary tables left out, within 1 %; small indices and
    statistics are what the closed form leaves out."""
    architecture = NARROW[name]
    table = model_chunks(architecture, SEQ, norm="unfused")
    wanted = sum(c.saved.sharded + c.saved.replicated for c in table.chunks if c.layer == layer)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = torch.randn(1, SEQ, architecture.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _, forward in regions(architecture, layer):
            x = forward(x)
    tables = (SEQ, architecture.rope_dim or architecture.head_dim)
    bases = [tensor if tensor._base is None else tensor._base for tensor in kept.values()]
    found = sum(
        base.untyped_storage().nbytes()
        for base in bases
        if not isinstance(base, torch.nn.Parameter) and base.shape != tables
    )
    assert found == pytest.approx(wanted, rel=0.01)
