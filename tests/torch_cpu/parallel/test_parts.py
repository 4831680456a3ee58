"""Parts of parallel execution that one process can check."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch

from piper_core.errors import ConfigError, PiperError
from piper_core.frontend import ring_attention
from piper_core.frontend.apart import apart
from piper_core.frontend.context_parallel import rezigzag, unzigzag, zigzag
from piper_core.frontend.degrees import Degrees
from tests.torch_cpu.parallel.models import MIXTURE

RANKS = 3


def test_zigzag_and_back() -> None:
    whole = torch.arange(2 * 24).view(2, 24)
    parts = [zigzag(whole, rank, RANKS) for rank in range(RANKS)]
    assert [part.shape for part in parts] == [(2, 8)] * RANKS
    assert torch.equal(unzigzag(torch.cat(parts, 1), RANKS), whole)
    assert torch.equal(rezigzag(whole, RANKS), torch.cat(parts, 1))


def test_every_query_meets_the_keys_before_it_once_and_ranks_work_alike() -> None:
    length, order = 4, torch.arange(4 * RANKS).view(1, -1)
    places = [zigzag(order, rank, RANKS)[0] for rank in range(RANKS)]
    met = torch.zeros(4 * RANKS, 4 * RANKS, dtype=torch.int64)
    work = []
    for rank in range(RANKS):
        before = int(met.sum())
        for other in range(RANKS):
            rows, columns, causal = ring_attention.block(rank, other, length, True)
            queries, keys = places[rank][rows], places[other][columns]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int64)
            met[queries.unsqueeze(1), keys] += pairs.tril() if causal else pairs
        work.append(int(met.sum()) - before)
    assert torch.equal(met, torch.ones_like(met).tril())
    assert all(one == other for one, other in pairwise(work))


@pytest.mark.parametrize("causal", [True, False])
def test_written_out_attention_equals_the_kernel(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, gradient = (torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out, lse = ring_attention._forward(q, k, v, causal, 0.3)
    torch.testing.assert_close(ring_attention.written_forward(q, k, v, causal, 0.3), (out, lse))
    torch.testing.assert_close(
        ring_attention.written_backward(gradient, q, k, v, out, lse, causal, 0.3),
        ring_attention._backward(gradient, q, k, v, out, lse, causal, 0.3),
    )


def test_experts_that_do_not_divide_are_refused() -> None:
    Degrees(expert=4).check(MIXTURE, 16)
    with pytest.raises(ConfigError, match="cannot be split 3 ways by expert; legal degrees are 1, 2, 4, 8"):
        Degrees(expert=3).check(MIXTURE, 16)


def test_a_process_apart_answers_fails_and_ends() -> None:
    assert apart(max, 1, 2) == 2
    with pytest.raises(ConfigError, match="split 3 ways"):
        apart(Degrees(expert=3).check, MIXTURE, 16)
    with pytest.raises(PiperError, match="fromhex failed in a process of its own: ValueError"):
        apart(bytes.fromhex, "no")
    with pytest.raises(PiperError, match="_exit failed in a process of its own: no message"):
        apart(os._exit, 3)
    with pytest.raises(PiperError, match="sleep took over 1 s"):
        apart(time.sleep, 60, timeout_s=1.0)
