"""Architecture records and presets against published parameter counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper_core.arch import PRESETS, model_chunks, preset
from piper_core.errors import ConfigError

# Billions. Llama 3: published checkpoints; GPT-3: 174.6 in the paper's table 2.1; Mixtral: 46.7 (Mistral AI).
# llama9b is the 8B model with four layers of 218.1 M more; the two Piper models are named by their size.
PUBLISHED = {
    "llama3-8b": (8.030, 0.001),
    "llama9b": (8.903, 0.001),
    "llama3-70b": (70.554, 0.001),
    "llama3-405b": (405.853, 0.001),
    "gpt3-175b": (174.6, 0.001),
    "mixtral-8x7b": (46.703, 0.001),
    "piper-1b": (1.07, 0.01),
    "piper-9b": (9.33, 0.01),
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_published(name: str) -> None:
    billions, tolerance = PUBLISHED[name]
    table = model_chunks(preset(name), 1024)
    assert table.parameters == pytest.approx(billions * 1e9, rel=tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_matmul_parameters_are_all_used_but_embedding_and_norms(name: str) -> None:
    architecture = preset(name)
    forward = sum(chunk.forward.matmul_flops for chunk in model_chunks(architecture, 1024).chunks)
    assert forward == pytest.approx(2 * architecture.matmul_parameters * 1024, rel=1e-9)


def test_names_are_forgiving_in_case_and_underscore() -> None:
    assert preset("Llama3_8B") is preset("llama3-8b")


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama9b"):
        preset("llama9")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"hidden": -4}, "hidden"),
        ({"vocab": 1.5}, "vocab"),
        ({"heads": True}, "heads"),
        ({"kv_heads": 5}, "kv_heads"),
        ({"norm": "batch"}, "norm"),
        ({"ffn": 0}, "ffn"),
        ({"top_k": 2}, "experts"),
        ({"experts": 4, "top_k": 5, "expert_ffn": 8}, "top_k"),
        ({"experts": 4, "top_k": 1}, "expert_ffn"),
    ],
)
def test_numbers_that_make_no_model_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        replace(preset("llama9b"), **change)
    assert "\n" not in str(caught.value)
