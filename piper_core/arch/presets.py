"""Architectures by name; each entry names where its numbers were published."""

from __future__ import annotations

from difflib import get_close_matches

from piper_core.arch.record import Architecture, RopeScaling
from piper_core.errors import ConfigError


def _llama2(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> Architecture:
    """Llama 2 family (arXiv 2307.09288, section 2.2; widths from the released checkpoints)."""
    return Architecture(name, layers, hidden, ffn, heads, kv_heads, 128, 32_000, max_seq=4096)


def _llama3(name: str, layers: int, hidden: int, ffn: int, heads: int) -> Architecture:
    """Llama 3 family (arXiv 2407.21783, table 3): 8 key heads, vocabulary 128,256, untied."""
    return Architecture(name, layers, hidden, ffn, heads, 8, 128, 128_256, rope_theta=500_000.0)


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, expert_ffn: int) -> Architecture:
    """Mixtures of the Qwen3 family (arXiv 2505.09388, table 2; widths from the released checkpoints)."""
    return Architecture(
        name, layers, hidden, 0, heads, 4, 128, 151_936, experts=128, top_k=8, expert_ffn=expert_ffn, qk_norm=True,
        norm_eps=1e-6, rope_theta=1e6, max_seq=40_960,
    )  # fmt: skip


def _piper(name: str, layers: int, hidden: int, heads: int, experts: int, expert_ffn: int) -> Architecture:
    """Mixture-of-experts models of the Piper paper: every layer a mixture, top 2, Qwen3's vocabulary."""
    return Architecture(name, layers, hidden, 0, heads, 8, 64, 151_936, experts=experts, top_k=2, expert_ffn=expert_ffn)


PRESETS: dict[str, Architecture] = {
    preset.name: preset
    for preset in (
        _llama2("llama2-7b", 32, 4096, 11_008, 32, 32),
        _llama2("llama2-13b", 40, 5120, 13_824, 40, 40),
        _llama2("llama2-70b", 80, 8192, 28_672, 64, 8),
        _llama3("llama3-8b", 32, 4096, 14_336, 32),
        _llama3("llama9b", 36, 4096, 14_336, 32),  # the 8B block, four layers more
        _llama3("llama3-70b", 80, 8192, 28_672, 64),
        _llama3("llama3-405b", 126, 16_384, 53_248, 128),
        # Radford 2019 and the released checkpoint
        Architecture(
            "gpt2-xl", 48, 1600, 6400, 25, 25, 64, 50_257, gated=False, bias=True, tied=True,
            activation="gelu_tanh", learned_positions=1024, norm="layer", max_seq=1024,
        ),
        # Brown 2020, arXiv 2005.14165, table 2.1; vocabulary 50,257 padded to 51,200 as Megatron-LM does
        Architecture(
            "gpt3-175b", 96, 12_288, 49_152, 96, 96, 128, 51_200, gated=False, bias=True, tied=True,
            activation="gelu_tanh", learned_positions=2048, norm="layer", max_seq=2048,
        ),
        # arXiv 2505.09388, table 1
        Architecture(
            "qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, qk_norm=True, norm_eps=1e-6, rope_theta=1e6,
            max_seq=40_960,
        ),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 768),
        _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 1536),
        # Jiang 2024, arXiv 2401.04088, table 1
        Architecture(
            "mixtral-8x7b", 32, 4096, 0, 32, 8, 128, 32_000, experts=8, top_k=2, expert_ffn=14_336,
            balance_loss=0.02, rope_theta=1e6, max_seq=32_768,
        ),
        # arXiv 2412.19437, section 4.2; multi-token prediction left out
        Architecture(
            "deepseek-v3", 61, 7168, 18_432, 128, 128, 192, 129_280, experts=256, top_k=8, expert_ffn=2048,
            shared_ffn=2048, dense_layers=3, balance="bias", expert_groups=8, top_groups=4, routed_scale=2.5,
            kv_rank=512, q_rank=1536, rope_dim=64, value_dim=128, norm_eps=1e-6, max_seq=163_840,
            rope_scaling=RopeScaling("yarn", 40.0, 4096, low=1.0, high=32.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        _piper("piper-1b", 16, 1024, 16, 4, 3584),
        _piper("piper-9b", 24, 2048, 32, 8, 7168),
        # for a CPU
        Architecture("tiny-llama", 8, 128, 384, 8, 4, 16, 512, max_seq=2048),
        Architecture("tiny-moe", 8, 64, 0, 8, 4, 8, 512, experts=8, top_k=2, expert_ffn=64, max_seq=2048),
    )
}  # fmt: skip


def preset(name: str) -> Architecture:
    """Return the architecture called ``name``.

    Raises:
        ConfigError: no such name; the message gives the nearest ones.
    """
    found = PRESETS.get(name.lower().replace("_", "-"))
    if found is None:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ConfigError(f"unknown model {name[:60]!r}; the nearest names are {', '.join(near)}")
    return found
