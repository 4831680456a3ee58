"""Architecture records: the numbers that fix a transformer's shape, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_core.errors import ConfigError

Norm = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, dense or mixture of experts.

    ``ffn`` is the width of the dense feed-forward block and ``expert_ffn`` that of one expert; with
    ``experts`` > 0 every layer is a mixture, its router picks ``top_k`` and ``shared_ffn`` > 0 adds one
    expert that all tokens use. ``gated`` is SwiGLU (three matrices), else GELU (two). ``bias`` is on every
    linear layer but router and head. ``tied`` shares embedding and head. ``learned_positions`` is the length
    of a learned position table, 0 for rotary positions.

    Raises:
        ConfigError: a number out of range, or numbers that contradict each other.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    gated: bool = True
    bias: bool = False
    tied: bool = False
    learned_positions: int = 0
    norm: Norm = "rms"
    max_seq: int = 8192

    def __post_init__(self) -> None:
        positive = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_seq")
        natural = ("ffn", "experts", "top_k", "expert_ffn", "shared_ffn", "learned_positions")
        for field in (*positive, *natural):
            value = getattr(self, field)
            least = 1 if field in positive else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._wrong(f"{field} must be an integer of at least {least}, found {value!r}")
        if self.heads % self.kv_heads:
            raise self._wrong(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.norm not in ("rms", "layer"):
            raise self._wrong(f"norm must be rms or layer, found {self.norm!r}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise self._wrong(f"top_k must lie in 1 to {self.experts} experts, found {self.top_k}")
        if self.experts and not self.expert_ffn:
            raise self._wrong("expert_ffn must be positive where there are experts")
        if not self.experts and (self.top_k or self.expert_ffn or self.shared_ffn):
            raise self._wrong("top_k, expert_ffn and shared_ffn need experts > 0")
        if not self.experts and not self.ffn:
            raise self._wrong("ffn must be positive in a dense model")

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"model {self.name!r}: {what}")

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together (values are as wide)."""
        return self.kv_heads * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token: ``top_k`` experts of each layer, the head, not the embedding."""
        matrices = 3 if self.gated else 2
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        if self.experts:
            width = self.top_k * self.expert_ffn + self.shared_ffn
            block = matrices * self.hidden * width + self.hidden * self.experts
        else:
            block = matrices * self.hidden * self.ffn
        return self.layers * (attention + block) + self.hidden * self.vocab

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of one trained token that MFU counts: 6 N + 12 L (heads x head_dim) s.

        N is ``matmul_parameters``; attention is counted in full, not halved for the causal mask, and
        recompute is not counted (Narayanan 2021, arXiv 2104.04473, appendix; Chowdhery 2022, appendix B).
        """
        return 6.0 * self.matmul_parameters + 12.0 * self.layers * self.q_width * seq_len
