"""Architectures by name; each entry names where its numbers were published."""

from __future__ import annotations

from difflib import get_close_matches

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError


def _llama3(name: str, layers: int, hidden: int, ffn: int, heads: int) -> Architecture:
    """Llama 3 family (arXiv 2407.21783, table 3): 8 key heads, vocabulary 128,256, untied."""
    return Architecture(name, layers, hidden, ffn, heads, 8, 128, 128_256)


def _piper(name: str, layers: int, hidden: int, heads: int, experts: int, expert_ffn: int) -> Architecture:
    """Mixture-of-experts models of the Piper paper: every layer a mixture, top 2, Qwen3's vocabulary."""
    return Architecture(name, layers, hidden, 0, heads, 8, 64, 151_936, experts=experts, top_k=2, expert_ffn=expert_ffn)


PRESETS: dict[str, Architecture] = {
    preset.name: preset
    for preset in (
        _llama3("llama3-8b", 32, 4096, 14_336, 32),
        _llama3("llama9b", 36, 4096, 14_336, 32),  # the 8B block, four layers more
        _llama3("llama3-70b", 80, 8192, 28_672, 64),
        _llama3("llama3-405b", 126, 16_384, 53_248, 128),
        # Brown 2020, arXiv 2005.14165, table 2.1; vocabulary 50,257 padded to 51,200 as Megatron-LM does
        Architecture(
            "gpt3-175b", 96, 12_288, 49_152, 96, 96, 128, 51_200, gated=False, bias=True, tied=True,
            activation="gelu_tanh", learned_positions=2048, norm="layer", max_seq=2048,
        ),
        # Jiang 2024, arXiv 2401.04088, table 1
        Architecture(
            "mixtral-8x7b", 32, 4096, 0, 32, 8, 128, 32_000, experts=8, top_k=2, expert_ffn=14_336,
            max_seq=32_768,
        ),
        _piper("piper-1b", 16, 1024, 16, 4, 3584),
        _piper("piper-9b", 24, 2048, 32, 8, 7168),
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
