"""The whole model: embedding, blocks, head with loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_core.arch.record import Architecture
from piper_core.models.attention import Attention, LatentAttention
from piper_core.models.feed_forward import Mlp
from piper_core.models.layers import Embedding, Linear, norm, widen
from piper_core.models.moe import Moe, Routing
from piper_core.models.rotary import Rope, Rotary
from piper_core.names import Region


class Embed(nn.Module):
    """Token and, where learned, position embeddings."""

    region = Region.EMBED

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        arch = architecture
        self.tokens = Embedding(arch.vocab, arch.hidden, device=device, dtype=dtype)
        learned = arch.learned_positions
        self.positions = Embedding(learned, arch.hidden, device=device, dtype=dtype) if learned else None
        self.scale = arch.hidden**0.5 if arch.scaled_embedding else 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (b, s, hidden) for int64 tokens (b, s)."""
        x = self.tokens(tokens)
        if self.scale:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x  # type: ignore[no-any-return]  # modules return Any


class Block(nn.Module):
    """One layer; ``index`` is its place in the whole model, whatever part of that is built."""

    def __init__(
        self, architecture: Architecture, index: int, routing: Routing, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.index = index
        self.attention = (LatentAttention if architecture.kv_rank else Attention)(architecture, device, dtype)
        if architecture.is_moe(index):
            self.moe = Moe(architecture, routing, device, dtype)
        else:
            self.mlp = Mlp(architecture, device, dtype)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Return (b, s, hidden) for x of (b, s, hidden)."""
        x = self.attention(x, rope)
        return (self.moe if hasattr(self, "moe") else self.mlp)(x)  # type: ignore[no-any-return]  # modules return Any


class Head(nn.Module):
    """Final norm, projection to the vocabulary, and the loss in at least fp32."""

    region = Region.HEAD

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.cap = architecture.logit_cap
        self.norm = norm(architecture, device, dtype)
        self.projection = Linear(architecture.hidden, architecture.vocab, False, device, dtype)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy over ``targets`` (b, s), -100 left out; without targets, logits."""
        logits = self.projection(self.norm(x))
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        if targets is None:
            return logits  # type: ignore[no-any-return]  # modules return Any
        return self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (b, s, vocab)."""
        return functional.cross_entropy(widen(logits).flatten(0, 1), targets.flatten())


class Transformer(nn.Module):
    """A decoder-only transformer; ``architecture`` is its record."""

    def __init__(
        self, architecture: Architecture, layers: int, routing: Routing, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.embed = Embed(architecture, device, dtype)
        self.rotary = None if architecture.learned_positions else Rotary(architecture, device, dtype)
        self.layers = nn.ModuleList(Block(architecture, i, routing, device, dtype) for i in range(layers))
        self.head = Head(architecture, device, dtype)
        tie(self)

    def rope(self, seq_len: int) -> Rope | None:
        """Return what blocks are given beside x."""
        return None if self.rotary is None else self.rotary(seq_len)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy loss, fp32 (fp64 in an fp64 model), or logits (b, s, vocab) without targets;
        tokens and targets are int64 (b, s)."""
        x, rope = self.embed(tokens), self.rope(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(x, targets)  # type: ignore[no-any-return]  # modules return Any


def tie(module: nn.Module) -> None:
    """Let a tied model's head have its embedding's weights, where ``module`` has both."""
    architecture = getattr(module, "architecture", None)
    embed, head = getattr(module, "embed", None), getattr(module, "head", None)
    if isinstance(architecture, Architecture) and architecture.tied and embed is not None and head is not None:
        head.projection.weight = embed.tokens.weight
