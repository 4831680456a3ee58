"""Closed-form chunk tables: what each region of a transformer computes, moves and keeps for one sequence.

Bytes are of 2-byte activations and weights unless said otherwise; weight gradients are accumulated in
4 bytes. With S tokens, H is one hidden-state tensor, Q and K the query and key tensors, G one feed-forward
tensor. Attention counts executed FLOPs: a causal flash kernel does half of 4 S^2 q_width in F and 2.5 times
that in its backward (Dao 2023, arXiv 2307.08691, section 4.1), all of it in BI. An unfused kernel does all
of it, and keeps 5 bytes a score: softmax, dropout mask, dropout output (Korthikanti 2022, arXiv 2205.05198,
section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from piper_core.arch.chunk import AttentionKernel, Chunk, Fusion, Matmul, ModelChunks, Parameter, Saved, Work
from piper_core.arch.contract import shard_units
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import Region

DTYPE_BYTES = 2
ACCUMULATE_BYTES = 8
"""Traffic of adding one weight gradient to its accumulator: read and write 4 bytes."""


def model_chunks(
    architecture: Architecture,
    seq_len: int,
    *,
    attention: AttentionKernel = "flash2",
    norm: Fusion = "fused",
    activation: Fusion | None = None,
) -> ModelChunks:
    """Return the chunk table of ``architecture`` at ``seq_len`` tokens a sequence.

    ``norm`` "unfused" is eager RMSNorm in fp32, which keeps an fp32 input and the normalised value too;
    ``activation`` "unfused" keeps silu(gate) beside gate, up and product (default: as ``norm``).

    Raises:
        ConfigError: sequence length or kernel out of range.
    """
    if seq_len < 1 or (architecture.learned_positions and seq_len > architecture.learned_positions):
        most = f"1 to {architecture.learned_positions}" if architecture.learned_positions else "at least 1"
        raise ConfigError(f"model {architecture.name!r}: sequence length must be {most}, found {seq_len}")
    if attention not in ("flash2", "flash1", "unfused"):
        raise ConfigError(f"attention must be flash2, flash1 or unfused, found {attention!r}")
    if norm not in ("fused", "unfused") or activation not in ("fused", "unfused", None):
        raise ConfigError(f"norm and activation must be fused or unfused, found {norm!r} and {activation!r}")
    build = _Builder(architecture, seq_len, attention, norm, activation or norm)
    chunks = [build.embed()]
    edges: list[tuple[int, int, float]] = []
    hidden = build.hidden
    templates = (
        (build.attention(), build.router(), build.expert())
        if architecture.experts
        else (build.attention(), build.mlp())
    )
    for layer in range(architecture.layers):
        first = len(chunks)
        edges.append((first - 1, first, hidden))
        for template in templates:
            chunks.append(_at_layer(template, layer))
        if architecture.experts:
            edges += [
                (first, first + 1, hidden),
                (first, first + 2, hidden),
                (first + 1, first + 2, build.token_bytes),
            ]
        else:
            edges.append((first, first + 1, hidden))
    edges.append((len(chunks) - 1, len(chunks), hidden))
    chunks.append(build.head())
    units = shard_units(architecture, seq_len)
    return ModelChunks(architecture.name, architecture.layers, seq_len, tuple(chunks), tuple(edges), units=units)


def _at_layer(template: Chunk, layer: int) -> Chunk:
    """Return ``template`` as a chunk of ``layer``; its Work and Saved records are shared, not copied."""
    parameters = tuple(replace(p, name=f"layers.{layer}.{p.name}") for p in template.parameters)
    tags = (("EP", layer),) if template.region is Region.EXPERT else ()
    return replace(template, layer=layer, parameters=parameters, tags=tags)


def _linear(
    tokens: float, out: int, inner: int, split: Literal["column", "row", ""], groups: int = 1
) -> tuple[Matmul, Matmul, Matmul]:
    """Return F, BI and BW of a linear layer that ``groups`` experts hold, ``tokens`` for each."""
    column, row = split == "column", split == "row"
    return (
        Matmul(tokens, out, inner, "m", "n" if column else "k" if row else "", groups),
        Matmul(tokens, inner, out, "m", "k" if column else "n" if row else "", groups),
        Matmul(out, inner, tokens, "k", "m" if column else "n" if row else "", groups),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A feed-forward block: linear layers, its activation's traffic and kernels in F and BI, and bytes of
    what it keeps before the product, of the product, of the gradients before the product."""

    linears: list[tuple[Matmul, Matmul, Matmul]]
    traffic: tuple[float, float]
    kernels: tuple[int, int]
    kept: float
    product: float
    gradients: float

    @property
    def weights(self) -> int:
        return sum(round(forward.n * forward.k) * forward.groups for forward, _, _ in self.linears)

    def __add__(self, other: _Block) -> _Block:
        return _Block(
            self.linears + other.linears,
            (self.traffic[0] + other.traffic[0], self.traffic[1] + other.traffic[1]),
            (self.kernels[0] + other.kernels[0], self.kernels[1] + other.kernels[1]),
            self.kept + other.kept,
            self.product + other.product,
            self.gradients + other.gradients,
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    """The five tensor sizes of a model at a sequence length, and one method a region."""

    arch: Architecture
    seq: int
    kernel: AttentionKernel
    norm: Fusion
    activation: Fusion

    @property
    def hidden(self) -> float:
        return float(self.seq * self.arch.hidden * DTYPE_BYTES)

    @property
    def token_bytes(self) -> float:
        return self.arch.top_k * self.hidden

    @property
    def unfused_norm(self) -> bool:
        return self.norm == "unfused" and self.arch.norm == "rms"

    def _works(
        self,
        linears: list[tuple[Matmul, Matmul, Matmul]],
        *,
        memory: tuple[float, float, float] = (0, 0, 0),
        replicated: tuple[float, float, float] = (0, 0, 0),
        attention: tuple[float, float] = (0, 0),
        span: tuple[float, float] = (0, 0),
        kernels: tuple[int, int, int],
        weights: int,
    ) -> tuple[Work, Work, Work]:
        """Assemble F, BI, BW from their linear layers and traffic; ``weights`` counts matmul weights held."""
        moved = (weights * DTYPE_BYTES, weights * DTYPE_BYTES, weights * ACCUMULATE_BYTES)
        core, spans = (*attention, 0), (*span, 0)
        return tuple(  # type: ignore[return-value]  # three phases, three works
            Work(
                sum(linear[phase].flops for linear in linears),
                core[phase],
                memory[phase],
                replicated[phase],
                float(moved[phase]),
                kernels[phase],
                tuple(linear[phase] for linear in linears),
                self.kernel,
                spans[phase],
            )
            for phase in range(3)
        )

    def _norm_traffic(self) -> tuple[float, float, int, int]:
        """Bytes of a norm in F and in BI, and kernels in F and BI.

        Fused: read x, write y; backward reads x and dy, writes dx. Eager: upcast, square, mean, scale, cast
        and weight are kernels of their own, about 13 and 20 hidden tensors of 2 bytes.
        """
        if self.unfused_norm:
            return 13 * self.hidden, 20 * self.hidden, 6, 9
        return 2 * self.hidden, 3 * self.hidden, 1, 1

    def _norm_saved(self) -> float:
        """What a norm and the linear layer behind it keep: input and output; eager 2 tensors more."""
        return (4 if self.unfused_norm else 2) * self.hidden

    def _norm_parameters(self, name: str) -> tuple[Parameter, ...]:
        weight = (Parameter(f"{name}.weight", self.arch.hidden, tensor=False),)
        bias = (Parameter(f"{name}.bias", self.arch.hidden, tensor=False),)
        return weight + bias if self.arch.norm == "layer" else weight

    def _weights(self, name: str, out: int, inner: int, *, row: bool = False) -> tuple[Parameter, ...]:
        """A linear layer's parameters; a row-parallel layer's bias is not divided."""
        weight = (Parameter(f"{name}.weight", out * inner),)
        return (*weight, Parameter(f"{name}.bias", out, tensor=not row)) if self.arch.bias else weight

    def embed(self) -> Chunk:
        """Token (and position) lookup; its gradient is all BW."""
        arch, hidden = self.arch, self.hidden
        learned = bool(arch.learned_positions)
        parameters = [Parameter("embed.weight", arch.vocab * arch.hidden, tie="embedding" if arch.tied else "")]
        if learned:
            parameters.append(Parameter("positions.weight", arch.learned_positions * arch.hidden, tensor=False))
        ids = 8.0 * self.seq
        return Chunk(
            Region.EMBED,
            -1,
            forward=Work(replicated_bytes=(5 if learned else 2) * hidden, kernels=3 if learned else 1),
            backward_input=Work(),
            backward_weight=Work(replicated_bytes=5 * hidden, kernels=2),  # read dy, add into fp32 rows
            parameters=tuple(parameters),
            output_bytes=hidden,
            hidden_bytes=hidden,
            saved=Saved(replicated=ids),
            saved_selective=Saved(replicated=ids),
            saved_full=Saved(replicated=ids),
            stash=Saved(replicated=ids + hidden),
        )

    def attention(self) -> Chunk:
        """Norm, query/key/value, rotary positions, attention, output projection, residual add."""
        arch, seq, hidden = self.arch, self.seq, self.hidden
        q, k = float(seq * arch.q_width * DTYPE_BYTES), float(seq * arch.kv_width * DTYPE_BYTES)
        qkv_width = arch.q_width + 2 * arch.kv_width
        linears = [
            _linear(seq, qkv_width, arch.hidden, "column"),
            _linear(seq, arch.hidden, arch.q_width, "row"),
        ]
        flash = self.kernel != "unfused"
        full = 4.0 * seq * seq * arch.q_width
        flops = (full / 2, 1.25 * full) if flash else (full, 2 * full)
        scores = 0.0 if flash else float(arch.heads * seq * seq)
        # the last 128 queries meet every key in F; in BI 64 keys meet every query, 2.5 times the work
        block = 4.0 * 128 * seq * arch.head_dim if flash else 0.0
        # F: scores written, scaled softmax, dropout (mask 1 byte), read again; BI: the same backwards
        core_traffic, core_backward = 11 * scores, 15 * scores
        rotary = 0.0 if arch.learned_positions else 2 * (q + k)
        bias = (qkv_width * seq * DTYPE_BYTES * 2.0, hidden) if arch.bias else (0.0, 0.0)
        norm_f, norm_b, kernels_f, kernels_b = self._norm_traffic()
        forward, backward_input, backward_weight = self._works(
            linears,
            memory=(rotary + core_traffic + bias[0], rotary + core_backward, bias[0] / 2),
            replicated=(norm_f + 3 * hidden, norm_b + 3 * hidden, bias[1]),
            attention=flops,
            span=(block, 1.25 * block),
            kernels=(
                kernels_f + 4 + (2 if rotary else 0) + (0 if flash else 3),
                kernels_b + 4 + (2 if rotary else 0) + (0 if flash else 4),
                2,
            ),
            weights=qkv_width * arch.hidden + arch.hidden * arch.q_width,
        )
        core = Work(replicated_bytes=norm_f, kernels=kernels_f)
        if not flash:
            core = core + Work(attention_flops=full, memory_bytes=core_traffic, kernels=5, attention_kernel=self.kernel)
        row_statistics = 4.0 * arch.heads * seq if flash else 0.0
        kept = 2 * q + 2 * k + row_statistics
        norms = self._norm_saved()
        width = arch.hidden
        return Chunk(
            Region.ATTENTION,
            0,
            forward,
            backward_input,
            backward_weight,
            core=core,
            parameters=(
                *self._norm_parameters("attention_norm"),
                *self._weights("attention.q", arch.q_width, width),
                *self._weights("attention.k", arch.kv_width, width),
                *self._weights("attention.v", arch.kv_width, width),
                *self._weights("attention.o", width, arch.q_width, row=True),
            ),
            output_bytes=hidden,
            hidden_bytes=hidden,
            kv_bytes=2 * k,
            qkvo_bytes=2 * q + 2 * k,
            saved=Saved(kept + 5 * scores, norms),
            saved_selective=Saved(kept, hidden),
            saved_full=Saved(replicated=hidden),
            stash=Saved(2 * q + 2 * k, 2 * hidden),  # attention out, d(q, k, v); norm out, d(projection)
            workspace_bytes=2 * q + 2 * k + 4 * scores,
        )

    def _block(self, ffn: int, tokens: float, groups: int = 1) -> _Block:
        """A feed-forward block over ``tokens`` tokens in each of ``groups``."""
        arch = self.arch
        g = float(tokens * groups * ffn * DTYPE_BYTES)
        wide = 2 if arch.gated else 1
        linears = [
            _linear(tokens, wide * ffn, arch.hidden, "column", groups),
            _linear(tokens, arch.hidden, ffn, "row", groups),
        ]
        fused = self.activation == "fused"
        if arch.gated:  # silu(gate) * up; backward reads dproduct, gate, up and writes dgate, dup
            traffic = (3 * g, 5 * g) if fused else (5 * g, 8 * g)
        else:  # gelu(x + bias)
            traffic = (2 * g, 3 * g) if fused else (4 * g, 5 * g)
        eager = g if arch.gated and not fused else 0.0
        return _Block(linears, traffic, (1, 1) if fused else (2, 2), wide * g + eager, g, wide * g)

    def _feed_forward_names(self) -> tuple[str, ...]:
        return ("gate", "up") if self.arch.gated else ("up",)

    def mlp(self) -> Chunk:
        """Norm, feed-forward block, residual add."""
        arch, hidden = self.arch, self.hidden
        block = self._block(arch.ffn, self.seq)
        norm_f, norm_b, kernels_f, kernels_b = self._norm_traffic()
        bias = (block.gradients, hidden) if arch.bias else (0.0, 0.0)
        forward, backward_input, backward_weight = self._works(
            block.linears,
            memory=(*block.traffic, bias[0]),
            replicated=(norm_f + 3 * hidden, norm_b + 3 * hidden, bias[1]),
            kernels=(kernels_f + block.kernels[0] + 3, kernels_b + block.kernels[1] + 3, 2),
            weights=block.weights,
        )
        return Chunk(
            Region.MLP,
            0,
            forward,
            backward_input,
            backward_weight,
            core=Work(
                memory_bytes=block.traffic[0],
                replicated_bytes=norm_f,
                kernels=kernels_f + block.kernels[0],
            ),
            parameters=(
                *self._norm_parameters("mlp_norm"),
                *(
                    parameter
                    for name in self._feed_forward_names()
                    for parameter in self._weights(f"mlp.{name}", arch.ffn, arch.hidden)
                ),
                *self._weights("mlp.down", arch.hidden, arch.ffn, row=True),
            ),
            output_bytes=hidden,
            hidden_bytes=hidden,
            saved=Saved(block.kept + block.product, self._norm_saved()),
            saved_selective=Saved(block.gradients, hidden),  # gate and up; the norm's input
            saved_full=Saved(replicated=hidden),
            stash=Saved(block.product + block.gradients, 2 * hidden),
            workspace_bytes=block.product + block.gradients,
        )

    def router(self) -> Chunk:
        """Norm, scores of the experts in fp32, top k, tokens permuted for dispatch."""
        arch, hidden, tokens = self.arch, self.hidden, self.token_bytes
        scores = 4.0 * self.seq * arch.experts
        norm_f, norm_b, kernels_f, kernels_b = self._norm_traffic()
        permute = hidden + tokens
        forward, backward_input, backward_weight = self._works(
            [_linear(self.seq, arch.experts, arch.hidden, "")],
            replicated=(norm_f + permute + 4 * scores, norm_b + permute + hidden + 4 * scores, 0),
            kernels=(kernels_f + 6, kernels_b + 5, 1),
            weights=arch.experts * arch.hidden,
        )
        routing = scores + 12.0 * self.seq * arch.top_k  # probabilities; index and weight of each copy
        return Chunk(
            Region.ROUTER,
            0,
            forward,
            backward_input,
            backward_weight,
            core=Work(replicated_bytes=norm_f, kernels=kernels_f),
            parameters=(
                *self._norm_parameters("mlp_norm"),
                Parameter("router.weight", arch.experts * arch.hidden, tensor=False),
            ),
            output_bytes=tokens,
            hidden_bytes=hidden,
            token_bytes=tokens,
            saved=Saved(0.0, self._norm_saved() + routing),
            saved_selective=Saved(0.0, hidden + routing),
            saved_full=Saved(0.0, hidden + routing),
            stash=Saved(0.0, hidden + scores),
            workspace_bytes=tokens,
        )

    def expert(self) -> Chunk:
        """All experts of a layer at balanced routing, weighted combine, residual add."""
        arch, hidden, tokens = self.arch, self.hidden, self.token_bytes
        block = self._block(arch.expert_ffn, self.seq * arch.top_k / arch.experts, arch.experts)
        inputs = tokens
        names = self._feed_forward_names()
        parameters = [
            Parameter(f"experts.{name}.weight", arch.experts * arch.expert_ffn * arch.hidden, expert=True)
            for name in (*names, "down")
        ]
        if arch.bias:
            parameters += [
                *(Parameter(f"experts.{n}.bias", arch.experts * arch.expert_ffn, expert=True) for n in names),
                Parameter("experts.down.bias", arch.experts * arch.hidden, tensor=False, expert=True),
            ]
        if arch.shared_ffn:
            block += self._block(arch.shared_ffn, self.seq)
            inputs += hidden
            parameters += [
                parameter
                for name in names
                for parameter in self._weights(f"shared.{name}", arch.shared_ffn, arch.hidden)
            ]
            parameters += self._weights("shared.down", arch.hidden, arch.shared_ffn, row=True)
        combine = tokens + 3 * hidden
        products = len(block.linears)
        forward, backward_input, backward_weight = self._works(
            block.linears,
            memory=(*block.traffic, 0.0),
            replicated=(combine, tokens + combine, 0.0),
            kernels=(block.kernels[0] + products + 3, block.kernels[1] + products + 3, products),
            weights=block.weights,
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
            saved=Saved(block.kept + block.product, inputs + tokens),  # inputs; outputs, for their weights
            saved_selective=Saved(block.gradients, inputs + tokens),
            saved_full=Saved(0.0, inputs),
            stash=Saved(block.product + block.gradients, inputs + tokens),
            workspace_bytes=block.product + block.gradients,
        )

    def head(self) -> Chunk:
        """Final norm, logits, loss in fp32: 4 bytes a logit kept (softmax), up to 6 more in passing."""
        arch, hidden = self.arch, self.hidden
        logits = float(self.seq * arch.vocab)
        norm_f, norm_b, kernels_f, kernels_b = self._norm_traffic()
        forward, backward_input, backward_weight = self._works(
            [_linear(self.seq, arch.vocab, arch.hidden, "column")],
            memory=((2 + 4 + 4 + 4 + 4) * logits, (4 + 4 + 4 + 2) * logits, 0.0),
            replicated=(norm_f, norm_b, 0.0),
            kernels=(kernels_f + 5, kernels_b + 4, 1),
            weights=arch.vocab * arch.hidden,
        )
        weight = Parameter("head.weight", arch.vocab * arch.hidden, tie="embedding" if arch.tied else "")
        return Chunk(
            Region.HEAD,
            arch.layers,
            forward,
            backward_input,
            backward_weight,
            core=Work(replicated_bytes=norm_f, kernels=kernels_f),
            parameters=(*self._norm_parameters("norm"), weight),
            hidden_bytes=hidden,
            loss_bytes=3 * 4.0 * self.seq,  # maximum, sum of exponentials, target logit
            saved=Saved(4 * logits, self._norm_saved()),
            saved_selective=Saved(4 * logits, hidden),
            saved_full=Saved(0.0, hidden),
            stash=Saved(2 * logits, hidden),
            workspace_bytes=6 * logits,
        )
