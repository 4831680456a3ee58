"""Modules against transformers 5.24: logits of small models whose weights a formula gives.

The golden file was written by running transformers' own modules in float64 (their norms and rotary tables are float32)
on these weights, matched by name, with a norm's weight less 1 for Gemma. ``config`` is what its ``config.json`` said.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch

from piper_core.arch.huggingface import from_config
from piper_core.models import build_model

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "models" / "transformers.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = build_model(from_config(GOLDEN[name]["config"], name), dtype=torch.float64)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            wave = torch.sin(steps * 0.7 + zlib.crc32(key.encode()) % 1000)
            value = 1 + 0.1 * wave if key.endswith("norm.weight") else 0.3 * wave
            parameter.copy_(value.view_as(parameter))
        logits = model((torch.arange(66) * 37 % 97).view(2, 33))[1, -1, :6]
    assert logits.tolist() == pytest.approx(GOLDEN[name]["logits"], abs=1e-4)
