"""Traced models take the strategies that closed forms take: the same programs compile to verified plans."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.closed_form import model_chunks
from piper_core.arch.huggingface import load_architecture
from piper_core.frontend.trace import trace_model
from piper_core.ir.dag import training_dag
from piper_core.schedule.compile import compile_program
from search.generators.recipe import program_of
from search.space import Configuration

SEQ = 512
CONFIGS = {
    "PP4 DP2 TP2 1F1B": Configuration(4, 2, 2, 1, "1f1b", 1, 1, 1, 4, "none", True, "even"),
    "PP2 EP4 DualPipeV": Configuration(2, 1, 4, 4, "dualpipev", 2, 1, 1, 4, "none", False, "even"),
    "PP2 DP2 ZeRO-3": Configuration(2, 1, 2, 1, "1f1b", 1, 3, 1, 4, "full", False, "even"),
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("hf") / "config.json"
    path.write_text(json.dumps(data))
    return path


@cache
def traced(name: str) -> ModelChunks:
    return trace_model(name, seq_len=SEQ).model()


CASES = [
    (name, which)
    for name in ("llama9b", "piper-9b", "a config")
    for which, config in CONFIGS.items()
    if config.ep == 1 or name == "piper-9b"  # a dense model has no experts to shard
]


@pytest.mark.parametrize(("name", "which"), CASES)
def test_traced_models_compile(name: str, which: str, config_file: Path) -> None:
    """The traced DAG compiles to a verified plan, of the actions that the closed form's has."""
    name, config = str(config_file) if name == "a config" else name, CONFIGS[which]
    architecture = load_architecture(name)
    stages = config.stages
    short, longer = divmod(architecture.layers, stages)
    program, mesh = program_of(config, tuple(short + (s < longer) for s in range(stages)), 64)
    batch = config.dp * config.micro_batch * config.num_microbatches
    plans = [
        compile_program(program, training_dag(model, global_batch=batch), mesh).plan
        for model in (traced(name), model_chunks(architecture, SEQ))
    ]
    assert plans[0].stages == stages
    assert plans[0].grid() == plans[1].grid()
