"""Closed forms of attention: grouped queries, and multi-head latents.

With S tokens, H is one hidden-state tensor, Q and K the query and key tensors. FLOPs are executed ones: a causal flash
kernel does half of 4 S^2 q_width in F and 2.5 times that in its backward (Dao 2023, arXiv 2307.08691, section 4.1), all
of it in BI. An unfused kernel does all of it, and keeps 5 bytes a score: softmax, dropout mask, dropout output
(Korthikanti 2022, arXiv 2205.05198, section 4.1); 2 without dropout, 6 where an eager softmax keeps fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.arch.chunk import Chunk, Parameter, Saved, Work
from piper_core.arch.parts import Linear, Parts, linear
from piper_core.names import Region


@dataclass(frozen=True, slots=True)
class _Projections:
    """What makes queries, keys and values: linear layers, parameters, traffic and kernels round them in F, BI and BW
    (divided by tensor parallelism, and not), and what they keep beside queries, keys, values and output."""

    linears: list[Linear]
    parameters: tuple[Parameter, ...]
    memory: tuple[float, float, float]
    replicated: tuple[float, float, float]
    kernels: tuple[int, int, int]
    saved: Saved
    selective: Saved
    stash: Saved
    column_bytes: float = 0.0


def attention(parts: Parts) -> Chunk:
    """Norm, query/key/value, rotary positions, attention, output projection, residual add."""
    arch, seq, hidden = parts.arch, parts.seq, parts.hidden
    q, value = parts.tensor(arch.q_width), parts.tensor(arch.value_width)
    keys = parts.tensor(arch.kv_width)
    made = _latent(parts) if arch.kv_rank else _grouped(parts)
    flash = parts.kernel not in ("unfused", "eager")
    full = 4.0 * seq * seq * arch.q_width
    flops = (full / 2, 1.25 * full) if flash else (full, 2 * full)
    scores = 0.0 if flash else float(arch.heads * seq * seq)
    # the last 128 queries meet every key in F; in BI 64 keys meet every query, 2.5 times the work
    block = 4.0 * 128 * seq * arch.head_dim if flash else 0.0
    core_traffic, core_backward, kept_score = (each * scores for each in _score_bytes(parts))
    inner = (0.0, 0.0) if flash else (2 / (1 / arch.head_dim + 1 / seq), 4 / (1 / arch.head_dim + 3 / seq))
    added, added_back, mask = parts.residual()
    norm = parts.norm_cost(hidden)
    post = parts.norm_cost(hidden if arch.post_norm else 0.0)
    has_post = int(arch.post_norm)
    forward, backward_input, backward_weight = parts.works(
        [*made.linears, linear(seq, arch.hidden, arch.value_width, "row")],
        memory=(made.memory[0] + core_traffic, made.memory[1] + core_backward, made.memory[2]),
        replicated=(
            made.replicated[0] + norm.forward + post.forward + added,
            made.replicated[1] + norm.backward + post.backward + added_back,
            made.replicated[2] + (hidden if arch.bias else 0.0),
        ),
        attention=flops,
        span=(block, 1.25 * block),
        inner=inner,
        kernels=(
            made.kernels[0] + norm.forward_kernels + post.forward_kernels * has_post + 3 + (0 if flash else 3),
            made.kernels[1] + norm.backward_kernels + post.backward_kernels * has_post + 3 + (0 if flash else 4),
            made.kernels[2] + 1,
        ),
    )
    core = Work(replicated_bytes=norm.forward, kernels=norm.forward_kernels)
    if not flash:
        core = core + Work(attention_flops=full, memory_bytes=core_traffic, kernels=5, attention_kernel=parts.kernel,
                           attention_inner=inner[0])  # fmt: skip
    row_statistics = 4.0 * arch.heads * seq if flash else 0.0
    kept = 2 * q + 2 * keys + row_statistics
    return Chunk(
        Region.ATTENTION,
        0,
        forward,
        backward_input,
        backward_weight,
        core=core,
        parameters=(
            *parts.norm_parameters("attention.norm"),
            *made.parameters,
            *parts.linear_parameters("attention.o", arch.hidden, arch.value_width, row=True),
            *(parts.norm_parameters("attention.post_norm") if arch.post_norm else ()),
        ),
        output_bytes=hidden,
        hidden_bytes=hidden,
        column_bytes=made.column_bytes,
        kv_bytes=2 * keys,
        qkvo_bytes=2 * q + 2 * keys,
        saved=made.saved + Saved(kept + kept_score, norm.kept + hidden + mask + post.kept),
        saved_selective=made.selective + Saved(kept, hidden + mask + (hidden if arch.post_norm else 0.0)),
        saved_full=Saved(replicated=hidden),
        stash=made.stash + Saved(value, 2 * hidden),  # attention out; norm out, d(projection)
        workspace_bytes=2 * q + 2 * keys + 8 * scores,
    )


def _score_bytes(parts: Parts) -> tuple[float, float, float]:
    """Return bytes a score, products apart: moved in F and BI, and kept.

    Softmax reads and writes 2 bytes in F, reads scores and gradients in BI; dropout 2 and 2 and a mask. Eager: the mask
    is added first, and softmax works in fp32 between two casts.
    """
    dropout = (5.0, 5.0, 3.0) if parts.dropout else (0.0, 0.0, 0.0)
    softmax = (4.0, 6.0, 2.0) if parts.kernel == "unfused" else (24.0, 24.0, 6.0)
    moved, back, kept = (a + b for a, b in zip(softmax, dropout, strict=True))
    return moved, back, kept


def _grouped(parts: Parts) -> _Projections:
    """Queries, keys and values from the hidden state, one product."""
    arch, seq = parts.arch, parts.seq
    q, k = parts.tensor(arch.q_width), parts.tensor(arch.kv_width)
    width = arch.q_width + 2 * arch.kv_width
    biased = arch.bias or arch.qkv_bias
    bias = 2 * parts.tensor(width) if biased else 0.0
    eager = parts.activation == "unfused"
    # one kernel reads and writes queries and keys; eager: halves swapped and negated, two products, a sum
    rotary = 0.0 if arch.learned_positions else (11 if eager else 2) * (q + k)
    moved = 2 * (q + 2 * k) + 2 * q if eager else 0.0  # queries, keys and values split, the output put together again
    turned = (10 if eager else 2) if rotary else 0
    norm = parts.norm_cost(q + k if arch.qk_norm else 0.0)
    norms = 2 if arch.qk_norm else 0
    parameters = tuple(
        parameter
        for name, out in (("q", arch.q_width), ("k", arch.kv_width), ("v", arch.kv_width))
        for parameter in parts.linear_parameters(f"attention.{name}", out, arch.hidden, bias=biased)
    )
    if arch.qk_norm:
        for name in ("q_norm", "k_norm"):
            parameters += parts.norm_parameters(f"attention.{name}", arch.head_dim)
    return _Projections(
        [linear(seq, width, arch.hidden, "column")],
        parameters,
        memory=(rotary + moved + bias + norm.forward, rotary + moved + norm.backward, bias / 2),
        replicated=(0.0, 0.0, 0.0),
        kernels=(1 + turned + norms * norm.forward_kernels, 1 + turned + norms * norm.backward_kernels, 1),
        saved=Saved(norm.kept),
        selective=Saved(q + k if arch.qk_norm else 0.0),
        stash=Saved(q + 2 * k),
    )


def _latent(parts: Parts) -> _Projections:
    """Queries, keys and values from latents (arXiv 2405.04434, section 2.1). The projections down are whole on every
    rank of a tensor group, those up are divided; heads are put together from plain and rotary parts, values padded to
    the width of keys."""
    arch, seq, t = parts.arch, parts.seq, parts.tensor
    q, value = t(arch.q_width), t(arch.value_width)
    down_width = arch.kv_rank + arch.rope_dim
    up_width = arch.q_width - arch.heads * arch.rope_dim + arch.value_width
    linears = [
        linear(seq, arch.q_width, arch.q_rank or arch.hidden, "column"),
        linear(seq, down_width, arch.hidden, ""),
        linear(seq, up_width, arch.kv_rank, "column"),
    ]
    parameters: tuple[Parameter, ...] = ()
    if arch.q_rank:
        linears.append(linear(seq, arch.q_rank, arch.hidden, ""))
        parameters = (
            *parts.linear_parameters("attention.q_down", arch.q_rank, arch.hidden, whole=True),
            *parts.norm_parameters("attention.q_norm", arch.q_rank),
        )
    parameters += (
        *parts.linear_parameters("attention.q", arch.q_width, arch.q_rank or arch.hidden),
        *parts.linear_parameters("attention.kv_down", down_width, arch.hidden, whole=True),
        *parts.norm_parameters("attention.kv_norm", arch.kv_rank),
        *parts.linear_parameters("attention.kv", up_width, arch.kv_rank),
    )
    norm = parts.norm_cost(t(arch.q_rank + arch.kv_rank))
    norms = 2 if arch.q_rank else 1
    together = 5 * q + 3 * value  # queries and keys rotated and joined, values padded, output cut
    latents = t(arch.q_rank + arch.kv_rank)
    return _Projections(
        linears,
        parameters,
        memory=(together, together, 0.0),
        replicated=(norm.forward, norm.backward, 0.0),
        kernels=(
            len(linears) + 8 + norms * norm.forward_kernels,
            len(linears) + 8 + norms * norm.backward_kernels,
            len(linears),
        ),
        saved=Saved(value, norm.kept + latents),  # output without its padding; norms, what the layers up take in
        selective=Saved(value, t(arch.q_rank + down_width)),
        stash=Saved(q + t(up_width), 2 * latents + t(arch.rope_dim)),
        column_bytes=t(arch.q_rank + down_width) if arch.q_rank else 0.0,
    )
