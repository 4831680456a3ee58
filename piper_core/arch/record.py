"""Architecture records: the numbers that fix a transformer's shape, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from piper_core.errors import ConfigError

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
Balance = Literal["loss", "bias"]
RopeKind = Literal["linear", "llama3", "yarn"]

_POSITIVE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_seq")
_MOST = {"layers": 10_000, "heads": 1 << 16, "experts": 1 << 16}
_MOST_WIDTH = 1 << 24
_CHOICES = {"norm": get_args(Norm), "activation": get_args(Activation), "balance": get_args(Balance)}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the ``original`` length that a model was first trained at.

    ``low`` and ``high`` bound the blend of stretched and original frequencies: wavelengths as parts of
    ``original`` for llama3, rotations within it for yarn (beta_slow, beta_fast). ``mscale`` and
    ``mscale_all_dim`` are yarn's (arXiv 2309.00071, section 3.4, as DeepSeek-V3 applies it).
    """

    kind: RopeKind
    factor: float
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, dense or mixture of experts.

    ``ffn`` is the width of a dense feed-forward block and ``expert_ffn`` that of one expert. With ``experts`` > 0
    every layer after the first ``dense_layers`` is a mixture: its router picks ``top_k``, and ``shared_ffn`` > 0
    adds one expert that all tokens use. ``balance`` "loss" is softmax scores and an auxiliary loss of weight
    ``balance_loss``; "bias" is sigmoid scores and a bias that only decides who is picked (arXiv 2412.19437, section
    2.1.2). ``expert_groups`` > 0 limits each token to ``top_groups`` groups; ``normalise_top_k`` makes the weights
    of the experts picked add up to ``routed_scale``.

    ``kv_rank`` > 0 is multi-head latent attention: keys and values come from one latent of that width, queries from
    one of ``q_rank`` (0: from the hidden state); of each head's ``head_dim``, ``rope_dim`` carry positions, and
    values are ``value_dim`` wide. Elsewhere both are 0: all of ``head_dim``.

    ``gated`` multiplies two projections (three matrices). ``bias`` is on every linear layer but router and head,
    ``qkv_bias`` on queries, keys and values alone. ``qk_norm`` normalises each query and key head, ``post_norm``
    what attention and feed-forward add to the residual. ``tied`` shares embedding and head. ``learned_positions``
    is the length of a learned position table, 0 for rotary positions. ``scaled_embedding`` multiplies embeddings by
    the root of ``hidden``; ``query_scale`` replaces ``head_dim`` in the scale of scores; ``logit_cap`` > 0 bounds
    logits. ``limits`` says, a line each, what the source of the record asks for and this project leaves out.

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
    dense_layers: int = 0
    balance: Balance = "loss"
    balance_loss: float = 0.001
    expert_groups: int = 0
    top_groups: int = 0
    normalise_top_k: bool = True
    routed_scale: float = 1.0
    kv_rank: int = 0
    q_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    scaled_embedding: bool = False
    query_scale: int = 0
    logit_cap: float = 0.0
    limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, str(field.type), getattr(self, field.name))
        if self.heads % self.kv_heads:
            raise self._wrong(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        self._check_experts()
        if not self.kv_rank and (self.q_rank or self.rope_dim or self.value_dim):
            raise self._wrong("q_rank, rope_dim and value_dim need kv_rank > 0")
        if self.kv_rank and not (0 < self.rope_dim < self.head_dim and self.kv_heads == self.heads):
            raise self._wrong("latent attention needs 0 < rope_dim < head_dim and kv_heads equal to heads")
        if self.kv_rank and not 0 < self.value_dim <= self.head_dim:
            raise self._wrong(f"value_dim must lie in 1 to head_dim {self.head_dim}, found {self.value_dim}")
        if self.kv_rank and (self.qk_norm or self.bias or self.qkv_bias):
            raise self._wrong("latent attention has no qk_norm and no biases")
        if self.kv_rank and self.learned_positions:
            raise self._wrong("latent attention has rotary positions")
        if self.post_norm and self.experts:
            raise self._wrong("post_norm and experts are not supported together")
        if not self.learned_positions and (self.rope_dim or self.head_dim) % 2:
            raise self._wrong("rotary positions need an even width of a head")

    def _check(self, name: str, kind: str, value: object) -> None:
        if name in _CHOICES and value not in _CHOICES[name]:
            raise self._wrong(f"{name} must be {' or '.join(_CHOICES[name])}, found {value!r}")
        if kind == "int":
            least, most = int(name in _POSITIVE), _MOST.get(name, _MOST_WIDTH)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise self._wrong(f"{name} must be an integer of {least} to {most}, found {str(value)[:40]!r}")
        if kind == "float" and not (isinstance(value, float) and 0 <= value < 1e12):
            raise self._wrong(f"{name} must be a number of at least 0, found {str(value)[:40]!r}")

    def _check_experts(self) -> None:
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise self._wrong(f"top_k must lie in 1 to {self.experts} experts, found {self.top_k}")
        if self.experts and not self.expert_ffn:
            raise self._wrong("expert_ffn must be positive where there are experts")
        if not self.experts and (self.top_k or self.expert_ffn or self.shared_ffn or self.dense_layers):
            raise self._wrong("top_k, expert_ffn, shared_ffn and dense_layers need experts > 0")
        if not self.experts and not self.ffn:
            raise self._wrong("ffn must be positive in a dense model")
        if self.dense_layers and not (self.ffn and self.dense_layers < self.layers):
            raise self._wrong(f"dense_layers {self.dense_layers} need ffn > 0 and fewer than {self.layers} layers")
        groups, top = self.expert_groups, self.top_groups
        if groups and (self.experts % groups or not 1 <= top <= groups or top * self.experts < self.top_k * groups):
            raise self._wrong(f"{groups} expert_groups, {top} top_groups must divide and hold {self.experts} experts")

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"model {self.name[:80]!r}: {what}")

    def is_moe(self, layer: int) -> bool:
        """Return whether ``layer`` is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all query heads' values together: what attention hands to its output projection."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def attention_parameters(self) -> int:
        """Weights of the linear layers of one layer's attention."""
        if not self.kv_rank:
            return 2 * self.hidden * (self.q_width + self.kv_width)
        queries = self.q_rank * (self.hidden + self.q_width) if self.q_rank else self.hidden * self.q_width
        latent = self.hidden * (self.kv_rank + self.rope_dim)
        keys_values = self.kv_rank * (self.q_width - self.heads * self.rope_dim + self.value_width)
        return queries + latent + keys_values + self.value_width * self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token: ``top_k`` experts of each layer, the head, not the embedding."""
        matrices = 3 if self.gated else 2
        mixture = matrices * self.hidden * (self.top_k * self.expert_ffn + self.shared_ffn) + self.hidden * self.experts
        dense = (self.layers - self.moe_layers) * matrices * self.hidden * self.ffn
        blocks = self.layers * self.attention_parameters + self.moe_layers * mixture + dense
        return blocks + self.hidden * self.vocab

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of one trained token that MFU counts: 6 N + 12 L (heads x head_dim) s.

        N is ``matmul_parameters``; attention is counted in full, not halved for the causal mask, and
        recompute is not counted (Narayanan 2021, arXiv 2104.04473, appendix; Chowdhery 2022, appendix B). Values
        narrower than keys count as they are.
        """
        attention = 6.0 * self.layers * (self.q_width + self.value_width) * seq_len
        return 6.0 * self.matmul_parameters + attention
