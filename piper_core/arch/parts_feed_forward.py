"""Closed forms of feed-forward regions: dense, router, experts. G is one feed-forward tensor."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.arch.chunk import Chunk, Parameter, Saved, Work
from piper_core.arch.parts import DTYPE_BYTES, Linear, Parts, linear
from piper_core.names import Region


@dataclass(frozen=True, slots=True)
class _Block:
    """A feed-forward block: linear layers, its activation's traffic and kernels in F and BI, and bytes of
    what it keeps before the product, of the product, of the gradients before the product."""

    linears: list[Linear]
    traffic: tuple[float, float]
    kernels: tuple[int, int]
    kept: float
    product: float
    gradients: float

    def __add__(self, other: _Block) -> _Block:
        return _Block(
            self.linears + other.linears,
            (self.traffic[0] + other.traffic[0], self.traffic[1] + other.traffic[1]),
            (self.kernels[0] + other.kernels[0], self.kernels[1] + other.kernels[1]),
            self.kept + other.kept,
            self.product + other.product,
            self.gradients + other.gradients,
        )


def _block(parts: Parts, ffn: int, tokens: float, groups: int = 1) -> _Block:
    """Return a feed-forward block over ``tokens`` tokens in each of ``groups``."""
    arch = parts.arch
    g = float(tokens * groups * ffn * DTYPE_BYTES)
    wide = 2 if arch.gated else 1
    linears = [
        linear(tokens, wide * ffn, arch.hidden, "column", groups),
        linear(tokens, arch.hidden, ffn, "row", groups),
    ]
    fused = parts.activation == "fused"
    if arch.gated:  # act(gate) * up; backward reads dproduct, gate, up and writes dgate, dup
        traffic = (3 * g, 5 * g) if fused else (5 * g, 9 * g)
    else:  # gelu(x + bias)
        traffic = (2 * g, 3 * g) if fused else (4 * g, 5 * g)
    eager = g if arch.gated and not fused else 0.0
    return _Block(linears, traffic, (1, 1) if fused else (2, 2), wide * g + eager, g, wide * g)


def _names(parts: Parts) -> tuple[str, ...]:
    return ("gate", "up") if parts.arch.gated else ("up",)


def _parameters(parts: Parts, name: str, ffn: int) -> tuple[Parameter, ...]:
    hidden = parts.arch.hidden
    wide = (p for each in _names(parts) for p in parts.linear_parameters(f"{name}.{each}", ffn, hidden))
    return (*wide, *parts.linear_parameters(f"{name}.down", hidden, ffn, row=True))


def mlp(parts: Parts) -> Chunk:
    """Norm, feed-forward block, residual add."""
    arch, hidden = parts.arch, parts.hidden
    block = _block(parts, arch.ffn, parts.seq)
    norm = parts.norm_cost(hidden)
    post, has_post = parts.norm_cost(hidden if arch.post_norm else 0.0), int(arch.post_norm)
    bias = (block.gradients, hidden) if arch.bias else (0.0, 0.0)
    added, added_back, mask = parts.residual()
    forward, backward_input, backward_weight = parts.works(
        block.linears,
        memory=(*block.traffic, bias[0]),
        replicated=(
            norm.forward + post.forward + added,
            norm.backward + post.backward + added_back,
            bias[1],
        ),
        kernels=(
            norm.forward_kernels + post.forward_kernels * has_post + block.kernels[0] + 3,
            norm.backward_kernels + post.backward_kernels * has_post + block.kernels[1] + 3,
            2,
        ),
    )
    again, *_ = parts.works(
        block.linears[:-1],
        memory=(block.traffic[0], 0.0, 0.0),
        replicated=(norm.forward, 0.0, 0.0),
        kernels=(norm.forward_kernels + block.kernels[0] + 1, 0, 0),
    )
    return Chunk(
        Region.MLP,
        0,
        forward,
        backward_input,
        backward_weight,
        again=None if arch.post_norm else again,  # whose input is the last product's result
        core=Work(
            memory_bytes=block.traffic[0],
            replicated_bytes=norm.forward,
            kernels=norm.forward_kernels + block.kernels[0],
        ),
        parameters=(
            *parts.norm_parameters("mlp.norm"),
            *_parameters(parts, "mlp", arch.ffn),
            *(parts.norm_parameters("mlp.post_norm") if arch.post_norm else ()),
        ),
        output_bytes=hidden,
        hidden_bytes=hidden,
        saved=Saved(block.kept + block.product, norm.kept + hidden + mask + post.kept),
        saved_selective=Saved(
            block.gradients, hidden + mask + (hidden if arch.post_norm else 0.0)
        ),  # gate, up; norms' inputs
        saved_full=Saved(replicated=hidden),
        stash=Saved(block.product + block.gradients, 2 * hidden),
        workspace_bytes=block.product + block.gradients,
    )


def router(parts: Parts) -> Chunk:
    """Norm, scores of the experts in fp32, top k, tokens permuted for dispatch."""
    arch, hidden, tokens = parts.arch, parts.hidden, parts.token_bytes
    scores = 4.0 * parts.seq * arch.experts
    norm = parts.norm_cost(hidden)
    permute = hidden + tokens
    forward, backward_input, backward_weight = parts.works(
        [linear(parts.seq, arch.experts, arch.hidden, "")],
        replicated=(norm.forward + permute + 4 * scores, norm.backward + permute + hidden + 4 * scores, 0),
        kernels=(norm.forward_kernels + 6, norm.backward_kernels + 5, 1),
    )
    routing = scores + 12.0 * parts.seq * arch.top_k  # probabilities; index and weight of each copy
    return Chunk(
        Region.ROUTER,
        0,
        forward,
        backward_input,
        backward_weight,
        core=Work(replicated_bytes=norm.forward, kernels=norm.forward_kernels),
        parameters=(
            *parts.norm_parameters("moe.router.norm"),
            Parameter("moe.router.scores.weight", arch.experts * arch.hidden, tensor=False),
        ),
        output_bytes=tokens + (hidden if arch.shared_ffn else 0.0),
        hidden_bytes=hidden,
        token_bytes=tokens,
        saved=Saved(0.0, norm.kept + hidden + routing),
        saved_selective=Saved(0.0, hidden + routing),
        saved_full=Saved(0.0, hidden + routing),
        stash=Saved(0.0, hidden + scores),
        workspace_bytes=tokens,
    )


def expert(parts: Parts) -> Chunk:
    """All experts of a layer at balanced routing, the shared one, weighted combine, residual add."""
    arch, hidden, tokens = parts.arch, parts.hidden, parts.token_bytes
    block = _block(parts, arch.expert_ffn, parts.seq * arch.top_k / arch.experts, arch.experts)
    shared, used = (hidden if arch.shared_ffn else 0.0), arch.top_k / arch.experts
    sizes = [(name, arch.expert_ffn) for name in _names(parts)] + [("down", arch.hidden)]
    parameters = [
        Parameter(f"moe.experts.{name}.weight", arch.experts * arch.expert_ffn * arch.hidden, expert=True, used=used)
        for name, _ in sizes
    ]
    if arch.bias:
        parameters += [
            Parameter(f"moe.experts.{name}.bias", arch.experts * out, tensor=name != "down", expert=True, used=used)
            for name, out in sizes
        ]
    if arch.shared_ffn:
        block += _block(parts, arch.shared_ffn, parts.seq)
        parameters += _parameters(parts, "moe.experts.shared", arch.shared_ffn)
    combine = tokens + 3 * hidden
    products = len(block.linears)
    forward, backward_input, backward_weight = parts.works(
        block.linears,
        memory=(*block.traffic, 0.0),
        replicated=(combine, tokens + combine, 0.0),
        kernels=(block.kernels[0] + products + 3, block.kernels[1] + products + 3, products),
    )
    return Chunk(
        Region.EXPERT,
        0,
        forward,
        backward_input,
        backward_weight,
        core=Work(memory_bytes=block.traffic[0], kernels=block.kernels[0]),
        parameters=tuple(parameters),
        output_bytes=hidden,
        hidden_bytes=hidden,
        token_bytes=tokens,
        saved=Saved(block.kept + block.product, 2 * tokens),  # inputs; outputs, for their weights
        saved_selective=Saved(block.gradients, 2 * tokens),
        saved_full=Saved(0.0, tokens),  # the router keeps what a shared expert takes in
        stash=Saved(block.product + block.gradients, 2 * tokens + shared),
        workspace_bytes=block.product + block.gradients,
    )
