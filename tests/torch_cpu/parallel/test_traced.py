"""Traced collectives equal the shard contract; products are divided evenly; degrees are checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from piper_core.arch import preset
from piper_core.errors import ConfigError
from piper_core.frontend.cache import Cache
from piper_core.frontend.collectives import Traced, traced
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_graphs
from piper_core.frontend.trace import trace_model
from piper_core.names import Axis, Collective, Phase, Region, ShardKind
from search.cli import main
from tests.torch_cpu.parallel.divided import WHOLE
from tests.torch_cpu.parallel.models import BATCH, GPT, LATENT, LLAMA, MIXTURE, SEQ
from tests.torch_cpu.parallel.traced import Row, rank_rows, total, whole_rows

DIVIDED = ((LLAMA, 2), (GPT, 2), (MIXTURE, 2), (LATENT, 2), (LLAMA, 4))
KINDS = (ShardKind.TENSOR, ShardKind.SEQUENCE)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for arch, degree in DIVIDED for kind in KINDS for row in rank_rows(arch, kind, degree)]


def test_dense_regions_have_exactly_the_contract_s_collectives(rows: list[Row]) -> None:
    dense = [row for row in rows if row.model in (LLAMA.name, GPT.name) and row.region is not Region.HEAD]
    assert len(dense) == 3 * 2 * 3 * 4  # models, kinds, regions, phases
    for row in dense:
        assert row.found == row.expected, row


def test_the_loss_reduces_as_much_as_the_contract_says(rows: list[Row]) -> None:
    heads = [row for row in rows if row.region is Region.HEAD]
    for row in heads:
        assert total(row.found) == total(row.expected), row
        assert row.phase is Phase.F or row.found == row.expected


def test_latents_enter_one_by_one(rows: list[Row]) -> None:
    """Two latents and the shared key are three collectives where the contract has one; BW does not read the key."""
    latent = [row for row in rows if row.model == LATENT.name and row.region is Region.ATTENTION]
    for row in latent:
        unread = 2 * BATCH * SEQ * LATENT.rope_dim
        expected = total(row.expected)
        if row.kind == "sequence" and row.phase in (Phase.B, Phase.BW):
            expected["ALL_GATHER", "SEQUENCE"] -= unread
        assert total(row.found) == expected, row


def test_experts_divided_by_width(rows: list[Row]) -> None:
    """As the contract, and beside it under ``tensor`` the gradients of the weights of a token's experts."""
    for row in (row for row in rows if row.model == MIXTURE.name and row.region is Region.EXPERT):
        expected = total(row.expected)
        if row.kind == "tensor" and row.phase in (Phase.B, Phase.BI):
            expected["ALL_REDUCE", "TENSOR"] += 2 * BATCH * SEQ * MIXTURE.top_k
        assert total(row.found) == expected, row
    assert all(not row.found for row in rows if row.region is Region.ROUTER)


def test_products_are_divided_evenly(rows: list[Row]) -> None:
    whole = {(row.model, row.region, row.phase): row.product_flops for arch in (LLAMA, GPT) for row in whole_rows(arch)}
    assert any(whole.values())
    for row in rows:
        if row.model in (LLAMA.name, GPT.name):
            assert row.product_flops * row.degree == whole[row.model, row.region, row.phase], row


def test_expert_and_context_exchanges_equal_the_contract() -> None:
    exchanged = [
        *rank_rows(MIXTURE, ShardKind.EXPERT, 2),
        *rank_rows(LLAMA, ShardKind.CONTEXT, 2),
        *rank_rows(LLAMA, ShardKind.CONTEXT, 2, "all_to_all"),
    ]
    assert {row.kind for row in exchanged} == {"expert", "context.ring", "context.all_to_all"}
    assert sum(bool(row.found) for row in exchanged) == 3 * 3  # F, B and BI of one region each
    for row in exchanged:
        assert total(row.found) == total(row.expected), row


def test_trace_of_one_rank() -> None:
    whole = trace_model(LLAMA, seq_len=64, cache=Cache(None))
    part = trace_model(LLAMA, seq_len=64, tp=2, sequence=True, cache=Cache(None))
    assert [row["id"] for row in part.rows()] == [row["id"] for row in whole.rows()]
    for one, half in zip(whole.rows(), part.rows(), strict=True):
        assert half["flops"] * 2 == one["flops"]
        if one["region"] in ("attention", "mlp"):  # activations are divided, whole weights are few
            assert half["saved_bytes"] * 2 == one["saved_bytes"]
            assert 0.5 <= half["parameter_bytes"] / one["parameter_bytes"] < 0.51


@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "method": "all_to_all"}, {"tp": 2, "cp": 2}], ids=str)
def test_context_ranks_share_the_work_evenly(options: dict[str, Any]) -> None:
    """Keys and values of all ranks come by in a ring: attention too is an equal part."""
    whole = trace_model(LLAMA, seq_len=64, cache=Cache(None)).rows()
    part = trace_model(LLAMA, seq_len=64, cache=Cache(None), **options).rows()
    ranks = options["cp"] * options.get("tp", 1)
    assert any(row["flops"] for row in whole if row["region"] == "attention")
    for one, other in zip(whole, part, strict=True):
        assert other["flops"] * ranks == one["flops"], one["id"]


def test_expert_ranks_share_the_experts() -> None:
    whole = trace_model(MIXTURE, seq_len=64, cache=Cache(None)).rows()
    part = trace_model(MIXTURE, seq_len=64, ep=4, cache=Cache(None)).rows()
    for one, other in zip(whole, part, strict=True):
        assert other["flops"] == one["flops"]  # under fair routing as many copies arrive as leave
        assert other["parameter_bytes"] * (4 if one["region"] == "expert" else 1) == one["parameter_bytes"]


def test_dispatch_and_combine_are_outermost() -> None:
    made = rank_graphs(MIXTURE, Degrees(2, True, 2), WHOLE, micro_batch=BATCH, seq_len=SEQ, dtype=torch.bfloat16)
    token = 2 * BATCH * SEQ * MIXTURE.top_k * MIXTURE.hidden
    (expert,) = (piece for piece in made.pieces if piece.site.region is Region.EXPERT)
    there = Traced(Collective.ALL_TO_ALL, Axis.EXPERT, token // 2)
    gather, scatter = (Traced(c, Axis.SEQUENCE, token) for c in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    assert traced(expert.forward) == (there, gather, scatter, there)
    assert traced(expert.recompute(send=True)) == (there, gather, scatter, there)
    assert traced(expert.backward_input) == (there, gather, scatter, there)
    assert traced(expert.backward_weight) == (gather,)


def test_the_command_says_which_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_CACHE", "")
    options = "--seq-len 64 --tp 2 --sequence-parallel --ep 2 --cp 2 --cp-method all_to_all"
    assert main(["trace", "--model", "tiny-moe", *options.split()]) == 0
    assert "tiny-moe, one rank of tp 2 x ep 2 x cp 2: " in capsys.readouterr().out.splitlines()[-1]
    assert main(["trace", "--model", "tiny-moe", *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tp"], found["ep"], found["cp"], found["sequence_parallel"]) == (2, 2, 2, True)
    assert main(["trace", "--model", "tiny-moe", "--ep", "3"]) == 2
    assert "cannot be split 3 ways by expert" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 3}, {"tp": 16}, {"tp": 8, "sequence": True, "seq_len": 4092}, {"tp": 0}, {"ep": 2}, {"ep": 0},
        {"cp": 3}, {"cp": 0}, {"cp": 16, "method": "all_to_all"}, {"tp": 4, "cp": 4, "method": "all_to_all"},
    ],
    ids=str,
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        trace_model("llama9b", cache=Cache(None), **{"seq_len": 4096, **options})
    assert "\n" not in str(error.value)


def test_degrees_that_divide_are_accepted() -> None:
    for degree in (1, 2, 4, 8):
        Degrees(tensor=degree, sequence=True, context=4).check(preset("llama9b"), 4096)
