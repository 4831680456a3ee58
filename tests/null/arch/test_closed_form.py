"""Closed-form chunk tables: FLOPs, bytes kept, edges, tags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.arch import PRESETS, Chunk, ModelChunks, Work, model_chunks, preset
from piper_core.errors import ConfigError
from piper_core.names import Region

MIB = 1 << 20
DENSE = ("llama2-7b", "llama3-8b", "llama9b", "llama3-70b", "llama3-405b", "gpt2-xl", "gpt3-175b", "qwen3-8b")
ALL = tuple(PRESETS)


def layer(table: ModelChunks, index: int) -> list[Chunk]:
    return [chunk for chunk in table.chunks if chunk.layer == index]


def mib_saved(table: ModelChunks) -> float:
    return sum(chunk.saved.sharded + chunk.saved.replicated for chunk in layer(table, 0)) / MIB


@pytest.mark.parametrize("name", DENSE)
def test_flops_are_6n_and_attention(name: str) -> None:
    architecture, seq = preset(name), min(2048, preset(name).max_seq)
    flops = sum(chunk.flops for chunk in model_chunks(architecture, seq, attention="unfused").chunks)
    assert flops == pytest.approx(architecture.model_flops_per_token(seq) * seq, rel=0.01)


def test_a_flash_kernel_does_half_of_causal_attention_and_recomputes_scores() -> None:
    full, flash = (
        model_chunks(preset("llama9b"), 4096, attention=kernel).chunks[1] for kernel in ("unfused", "flash2")
    )
    assert flash.forward.attention_flops == full.forward.attention_flops / 2
    assert flash.backward_input.attention_flops == 2.5 * flash.forward.attention_flops
    assert flash.backward_weight.attention_flops == 0


def test_a_layer_keeps_what_a_trace_of_it_keeps() -> None:
    """An eager llama9b layer at 4096 tokens was traced at 785 MiB of distinct saved storages."""
    architecture = preset("llama9b")
    assert mib_saved(model_chunks(architecture, 4096, norm="unfused")) == pytest.approx(785, abs=1)
    assert mib_saved(model_chunks(architecture, 4096)) == pytest.approx(544.5)


def test_an_unfused_gpt_layer_keeps_the_published_bytes() -> None:
    """34 s h + 5 a s^2 for 2-byte GPT (Korthikanti 2022, section 4.1)."""
    architecture, seq = preset("gpt3-175b"), 2048
    table = model_chunks(architecture, seq, attention="unfused", dropout=True)
    published = seq * architecture.hidden * 34 + 5 * architecture.heads * seq * seq
    assert mib_saved(table) * MIB == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kernel", ["flash2", "unfused"])
def test_recompute_keeps_less_and_less(name: str, kernel: str) -> None:
    for chunk in model_chunks(preset(name), 1024, attention=kernel).chunks:  # type: ignore[arg-type]
        kept = [saved.sharded + saved.replicated for saved in (chunk.saved, chunk.saved_selective, chunk.saved_full)]
        assert kept == sorted(kept, reverse=True), chunk.name


@pytest.mark.parametrize("name", ALL)
def test_shapes_add_up_to_flops(name: str) -> None:
    for chunk in model_chunks(preset(name), 1024).chunks:
        for work in (chunk.forward, chunk.backward_input, chunk.backward_weight):
            assert sum(matmul.flops for matmul in work.matmuls) == pytest.approx(work.matmul_flops)


@pytest.mark.parametrize("name", ALL)
def test_edges_follow_the_model(name: str) -> None:
    table = model_chunks(preset(name), 512)
    mixtures = preset(name).moe_layers
    assert len(table.chunks) == table.layers * 2 + mixtures + 2
    assert len(table.edges) == table.layers * 2 + mixtures * 2 + 1
    assert all(0 <= source < target < len(table.chunks) and size > 0 for source, target, size in table.edges)
    for source, target, size in table.edges:
        assert size == table.chunks[source].output_bytes or table.chunks[target].region is Region.EXPERT
    names = [chunk.name for chunk in table.chunks]
    assert len(set(names)) == len(names)
    assert names[0] == "embed"
    assert names[-1] == "head"


def test_experts_are_numbered_in_order() -> None:
    experts = [chunk for chunk in model_chunks(preset("piper-1b"), 512).chunks if chunk.region is Region.EXPERT]
    assert [chunk.tags for chunk in experts] == [(("EP", index),) for index in range(16)]
    assert all(parameter.expert for chunk in experts for parameter in chunk.parameters)


def test_the_head_keeps_logits_in_fp32() -> None:
    head = model_chunks(preset("llama9b"), 4096).chunks[-1]
    assert head.saved.sharded == 4 * 4096 * 128_256
    assert head.workspace_bytes == 6 * 4096 * 128_256


def test_a_shared_expert_and_expert_biases_are_counted() -> None:
    plain = preset("piper-1b")
    more = replace(plain, shared_ffn=512, bias=True)
    before, after = (model_chunks(a, 512).chunks[3] for a in (plain, more))
    shared = 3 * 1024 * 512 + 2 * 512 + 1024
    assert after.numel - before.numel == shared + 4 * (2 * 3584 + 1024)
    assert after.forward.matmul_flops - before.forward.matmul_flops == 2 * 512 * 3 * 1024 * 512


def test_tied_embeddings_count_once() -> None:
    architecture = preset("llama3-8b")
    tied = model_chunks(replace(architecture, tied=True), 512)
    assert model_chunks(architecture, 512).parameters - tied.parameters == 128_256 * 4096


def test_work_adds() -> None:
    attention, mlp = model_chunks(preset("llama9b"), 512).chunks[1:3]
    both = attention.forward + mlp.forward
    assert both.flops == attention.forward.flops + mlp.forward.flops
    assert both.attention_kernel == "flash2"
    assert both + Work() == both


@pytest.mark.parametrize(
    ("name", "seq", "options"),
    [
        ("llama9b", 0, {}),
        ("gpt3-175b", 4096, {}),
        ("llama9b", 512, {"attention": "flash9"}),
        ("llama9b", 512, {"norm": "some"}),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, seq: int, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        model_chunks(preset(name), seq, **options)  # type: ignore[arg-type]


def test_the_first_layers_may_be_dense() -> None:
    table = model_chunks(preset("deepseek-v3"), 512)
    regions = [[str(chunk.region) for chunk in layer(table, index)] for index in range(61)]
    assert regions[:3] == [["attention", "mlp"]] * 3
    assert regions[3:] == [["attention", "router", "expert"]] * 58
    assert [chunk.tags for chunk in table.chunks if chunk.region is Region.EXPERT][:2] == [(("EP", 0),), (("EP", 1),)]
    assert all(source < target < len(table.chunks) for source, target, _ in table.edges)
    assert len(table.edges) == 3 * 2 + 58 * 4 + 1
    router = layer(table, 3)[1]
    assert router.output_bytes == (8 + 1) * 512 * 7168 * 2  # eight copies, and every token for the shared expert


def test_latent_attention_is_whole_on_the_way_down_and_divided_on_the_way_up() -> None:
    attention = layer(model_chunks(preset("deepseek-v3"), 512), 0)[0]
    whole = {parameter.name.split(".")[3] for parameter in attention.parameters if not parameter.tensor}
    assert whole == {"norm", "q_down", "q_norm", "kv_down", "kv_norm"}
    assert attention.column_bytes == 512 * (1536 + 512 + 64) * 2
    assert attention.numel == 187_107_328 + 7168  # linear layers with their two norms, and the norm before


def test_norms_of_heads_and_behind_regions_cost() -> None:
    plain = preset("llama3-8b")
    for more in (replace(plain, qk_norm=True), replace(plain, post_norm=True), replace(plain, qkv_bias=True)):
        before, after = (layer(model_chunks(a, 512), 0)[0] for a in (plain, more))
        assert after.numel > before.numel
        assert after.forward.memory_bytes + after.forward.replicated_bytes > (
            before.forward.memory_bytes + before.forward.replicated_bytes
        )
        assert after.forward.matmul_flops == before.forward.matmul_flops


def test_a_cap_on_logits_and_a_scaled_embedding_cost() -> None:
    plain = preset("llama3-8b")
    more = replace(plain, logit_cap=30.0, scaled_embedding=True)
    before, after = (model_chunks(a, 512).chunks for a in (plain, more))
    assert after[-1].saved.sharded == before[-1].saved.sharded + 2 * 512 * 128_256
    assert after[0].forward.replicated_bytes == before[0].forward.replicated_bytes * 2
