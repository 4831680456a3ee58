"""Traced tables against closed forms, and against captures at other batches."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from piper_core import training_dag
from piper_core.arch import PRESETS, Chunk, ModelChunks, model_chunks, preset
from piper_core.frontend.cache import Cache
from piper_core.frontend.capture import capture, fake
from piper_core.frontend.chunks import table
from piper_core.frontend.cut import cut
from piper_core.frontend.layout import Layout
from piper_core.frontend.table import Kernels, Trace
from piper_core.frontend.trace import captured_layers, trace_model, trace_module
from piper_core.models import build_model
from piper_core.names import Region
from tests.torch_cpu.frontend.small import Plain, Staged
from tests.torch_cpu.models.tiny import TINY

NOWHERE = Cache(None)


@cache
def traced(name: str, kernels: Kernels = "eager") -> tuple[Trace, ModelChunks]:
    """Return a preset's trace and its table at (at most) 1024 tokens."""
    trace = trace_model(name, seq_len=min(1024, preset(name).max_seq), kernels=kernels, cache=NOWHERE)
    return trace, trace.model()


def distinct(table: ModelChunks) -> list[int]:
    """Return the places of chunks that differ: those of the first and last layer and the ends."""
    last = table.layers - 1
    return [i for i, chunk in enumerate(table.chunks) if chunk.layer in (-1, 0, last, table.layers)]


def kept(chunk: Chunk) -> float:
    return chunk.saved.sharded + chunk.saved.replicated


@pytest.mark.parametrize("name", PRESETS)
def test_traced_and_closed_tables_agree(name: str) -> None:
    """Same chunks, edges and tags; FLOPs, parameters and activations within 5 %."""
    _, ours = traced(name)
    closed = model_chunks(preset(name), ours.seq_len, norm="unfused")
    assert [chunk.name for chunk in ours.chunks] == [chunk.name for chunk in closed.chunks]
    assert [chunk.tags for chunk in ours.chunks] == [chunk.tags for chunk in closed.chunks]
    assert [edge[:2] for edge in ours.edges] == [edge[:2] for edge in closed.edges]
    routing = (16.0 * preset(name).top_k + 1) * ours.seq_len  # which token a copy is of, and its weight
    assert [edge[2] for edge in ours.edges] == pytest.approx([edge[2] for edge in closed.edges], rel=0.01, abs=routing)
    assert (ours.parameters, ours.active_parameters) == (closed.parameters, closed.active_parameters)
    assert (ours.units, ours.layers) == (closed.units, closed.layers)
    for i in distinct(closed):
        mine, theirs = ours.chunks[i], closed.chunks[i]
        for phase in ("forward", "backward_input", "backward_weight"):
            found, wanted = getattr(mine, phase), getattr(theirs, phase)
            assert found.matmul_flops == pytest.approx(wanted.matmul_flops, rel=0.01), (mine.name, phase)
        assert (mine.again is None) == (theirs.again is None), mine.name
        if mine.again and theirs.again:
            assert mine.again.matmul_flops == pytest.approx(theirs.again.matmul_flops, rel=0.01), mine.name
            assert found.attention_flops == pytest.approx(wanted.attention_flops, rel=0.01), (mine.name, phase)
            assert found.attention_span == pytest.approx(wanted.attention_span)
        assert {p.name: p for p in mine.parameters} == {p.name: p for p in theirs.parameters}
        scores = 8.0 * preset(name).experts * ours.seq_len if mine.region is Region.ROUTER else 0.0
        assert kept(mine) == pytest.approx(kept(theirs), rel=0.05, abs=scores + routing), mine.name
    total = [sum(kept(table.chunks[i]) for i in distinct(table)) for table in (ours, closed)]
    assert total[0] == pytest.approx(total[1], rel=0.05)


@pytest.mark.parametrize("name", ["llama9b", "gpt3-175b", "piper-9b", "qwen3-8b", "deepseek-v3"])
def test_what_strategies_read_agrees_too(name: str) -> None:
    _, ours = traced(name)
    closed = model_chunks(preset(name), ours.seq_len, norm="unfused")
    for i in distinct(closed):
        mine, theirs = ours.chunks[i], closed.chunks[i]
        for field in ("output_bytes", "hidden_bytes", "column_bytes", "token_bytes", "kv_bytes", "qkvo_bytes",
                      "loss_bytes"):  # fmt: skip
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=0.05), (mine.name, field)
        if mine.region in (Region.ATTENTION, Region.MLP):
            assert mine.saved.sharded == pytest.approx(theirs.saved.sharded, rel=0.02)
            assert mine.saved_full.replicated == pytest.approx(theirs.saved_full.replicated, rel=0.02)
        for phase in ("forward", "backward_input", "backward_weight"):
            shapes = [
                {split: sum(m.flops for m in getattr(chunk, phase).matmuls if m.split == split) for split in "mnk"}
                for chunk in (mine, theirs)
            ]
            assert shapes[0] == pytest.approx(shapes[1], rel=0.01), (mine.name, phase)


@pytest.mark.parametrize("name", ["llama9b", "piper-9b", "gpt3-175b"])
def test_fused_kernels_agree_with_the_fused_closed_form(name: str) -> None:
    _, ours = traced(name, "fused")
    closed = model_chunks(preset(name), ours.seq_len)
    for i in distinct(closed):
        assert kept(ours.chunks[i]) == pytest.approx(kept(closed.chunks[i]), rel=0.02), ours.chunks[i].name
    for i in (j for j in distinct(closed) if closed.chunks[j].region is Region.MLP and name == "llama9b"):
        mine, theirs = ours.chunks[i], closed.chunks[i]
        for phase in ("forward", "backward_input"):
            for field in ("memory_bytes", "replicated_bytes"):
                assert getattr(getattr(mine, phase), field) == pytest.approx(getattr(getattr(theirs, phase), field))


def test_fused_kernels_move_less_and_compute_the_same() -> None:
    eager, fused = (traced("llama9b", kernels)[0].rows() for kernels in ("eager", "fused"))
    for one, other in zip(eager, fused, strict=True):
        assert one["flops"] == other["flops"]
        assert other["bytes_read"] <= one["bytes_read"]
        assert other["kernels"] <= one["kernels"]


def test_a_dense_model_does_6n_and_attention() -> None:
    _, ours = traced("llama9b")
    architecture, causal = preset("llama9b"), 0.5
    seq = ours.seq_len
    attention = 12.0 * architecture.layers * architecture.q_width * seq * seq
    flops = sum(chunk.flops for chunk in ours.chunks)
    executed = 6.0 * architecture.matmul_parameters * seq + attention * causal * 3.5 / 3  # scores are made twice
    assert flops == pytest.approx(executed, rel=0.01)


@pytest.mark.parametrize("name", ["llama9b", "piper-9b"])
def test_whole_backwards_are_their_parts(name: str) -> None:
    rows = {(row["id"], row["phase"]): row for row in traced(name)[0].rows()}
    for chunk in {chunk for chunk, _ in rows}:
        whole, first, second = (rows[chunk, phase] for phase in ("B", "BI", "BW"))
        assert whole["flops"] == first["flops"] + second["flops"]
        for field in ("bytes_read", "bytes_written"):
            assert first[field] + second[field] == pytest.approx(whole[field], rel=0.02)


@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("gpt", 5), ("mixtral", 1), ("deepseek", 5)])
def test_costs_are_affine_in_the_microbatch(name: str, batch: int) -> None:
    """What two captures say of a third batch is what its own capture says."""
    architecture = replace(TINY[name], layers=2)
    trace = trace_model(architecture, seq_len=16, cache=NOWHERE)
    assert trace.affine
    with fake(torch.bfloat16):
        model = build_model(architecture, dtype=torch.bfloat16)
        x = torch.empty(batch, 16, dtype=torch.int64)
        made = cut(capture(model, (x, x.clone())))
    itself = table("", [made], [batch], Layout((0, 1)), seq_len=16, micro_batch=batch)
    fields = ("id", "phase", "flops", "bytes_read", "bytes_written", "saved_bytes", "parameter_bytes")
    for ours, theirs in zip(trace.rows(batch), itself.rows(), strict=True):
        assert [ours[f] for f in fields] == pytest.approx([theirs[f] for f in fields])


def test_layers_that_stand_for_others() -> None:
    base = TINY["llama"]
    assert captured_layers(replace(base, layers=1)) == ((0,), (0,))
    assert captured_layers(replace(base, layers=5)) == ((0, 1), (0, 1, 1, 1, 1))
    mixed = replace(TINY["deepseek"], layers=6, dense_layers=1)
    assert captured_layers(mixed) == ((0, 1, 2), (0, 1, 2, 2, 2, 2))


@pytest.mark.parametrize("name", ["llama9b", "gpt3-175b", "deepseek-v3"])
def test_a_trace_survives_json(name: str) -> None:
    trace, _ = traced(name)
    again = Trace.from_data(json.loads(json.dumps(trace.to_data())))
    assert again == trace
    assert again.model() == trace.model()


def test_a_persons_module_becomes_a_dag() -> None:
    trace = trace_module(Plain(depth=4), (torch.randn(2, 4),))
    assert trace.affine
    assert (trace.layers, trace.name) == (4, "Plain")
    chunks = trace.model()
    assert chunks.parameters == sum(p.numel() for p in Plain(depth=4).parameters())
    assert [row["count"] for row in trace.rows() if row["phase"] == "F"] == [1, 4, 4, 1]
    assert chunks.chunks[3].parameters[0].name == "blocks.1.before.weight"
    assert len(training_dag(chunks)) == 2 * len(chunks.chunks)


def test_a_persons_tags_are_tags_of_chunks() -> None:
    chunks = trace_module(Staged(), (torch.randn(2, 4),)).model().chunks
    assert [chunk.tags for chunk in chunks] == [(("PP", 0),), (("EP", 0), ("PP", 1))]


def test_costs_that_are_not_affine_hold_for_one_batch() -> None:
    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return (y @ y.T).sum()

    trace = trace_module(Square(), (torch.randn(6, 4),), micro_batch=8)
    assert not trace.affine
    assert trace.rows()[0]["flops"] == 2 * 8 * 4 * 4 + 2 * 8 * 8 * 4
