"""A step of many microbatches is what two shorter ones say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from profiler.spec import load_cluster
from search.predict import predict
from search.request import Request
from search.rounds import extended, representative, rounds
from search.space import Configuration
from tests.null.search.spaces import DENSE, MOE

CLUSTER = load_cluster("p4de")
CASES: list[dict[str, Any]] = [
    {"schedule": name, "pp": 2, "gpus": 4, "zero": 1} for name in FAMILIES if name != "gpipe"
] + [
    {"gpus": 2},
    {"gpus": 2, "zero": 3},
    {"gpus": 4, "pp": 2, "zero": 2},
    {"gpus": 4, "pp": 2, "zero": 3},
    {"gpus": 3, "pp": 3},
    {"gpus": 4, "pp": 2, "tp": 2, "schedule": "dualpipev"},
    {"gpus": 4, "pp": 2, "ep": 2, "architecture": MOE, "recompute": "full"},
]  # fmt: skip


@pytest.mark.parametrize("fields", CASES)
def test_equals_the_whole_step(fields: dict[str, Any]) -> None:
    more = dict(fields)
    architecture = more.pop("architecture", DENSE)
    m = 41 if more.get("pp") == 3 else 42  # no whole number of rounds
    request = Request(architecture, CLUSTER, seq_len=512, num_microbatches=m, micro_batch=1, **more)
    config = request.resolve()
    shorter = rounds(config)
    assert shorter is not None
    assert shorter[1] < m
    low, high = (predict(replace(request, num_microbatches=n, global_batch=n * config.dp)).score for n in shorter)
    short, whole = extended(low, high, config, shorter), predict(request).score
    near = 2e-3 if more.get("zero", 0) >= 2 else 1e-9  # contention settles more slowly
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=near)
    assert short.tokens_per_s_per_gpu == pytest.approx(whole.tokens_per_s_per_gpu, rel=near)
    assert (short.mfu, short.model_tflops_per_gpu) == pytest.approx((whole.mfu, whole.model_tflops_per_gpu), rel=near)
    assert short.bubble_ratio == pytest.approx(whole.bubble_ratio, abs=near)
    assert short.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=2e-3)
    assert short.fits == whole.fits
    assert short.breakdown == pytest.approx(whole.breakdown, abs=2e-3 * whole.step_time_s)  # a wait may count elsewhere


def test_short_steps_and_gpipe_are_taken_whole() -> None:
    for fields in ({"num_microbatches": 4}, {"num_microbatches": 200, "schedule": "gpipe"}):
        request = Request(DENSE, CLUSTER, seq_len=512, gpus=2, pp=2, micro_batch=1, **fields)  # type: ignore[arg-type]  # any field
        assert rounds(request.resolve()) is None


Unit = tuple[str, int, int, bool]


def follows(name: str, p: int, m: int, v: int) -> set[tuple[int, tuple[Unit, ...], tuple[Unit, ...]]]:
    """Return which slot comes after which on each row, microbatches counted from the first of each direction and from
    the earliest in the slot before."""
    family, found = FAMILIES[name], set()
    half = m // 2 if family.layout is Layout.BIDIRECTIONAL else m
    for row, slots in enumerate(family.grid(p, m, v).rows):
        units = [[(a.kind.name, a.stage, a.microbatch % half, a.microbatch >= half) for a in slot] for slot in slots]
        for before, after in pairwise(units):
            base = min(mb for _, _, mb, _ in before)
            one, two = (
                tuple(sorted((k, s, mb - base, up) for k, s, mb, up in each)) for each in (before, after)
            )  # fmt: skip
            found.add((row, one, two))
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpipe"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_step_that_is_proved_for_a_longer_one_orders_rows_as_that_does(name: str, p: int) -> None:
    for v in [v for v in (1, 2, 3) if v in FAMILIES[name].virtual_stages(p)]:
        legal = FAMILIES[name].microbatches(p, v)
        whole = p if name == "interleaved_1f1b" else 1
        longer = [m for m in range(8 * p, 10 * p + 4, whole) if m in legal]
        for m in longer:
            few = representative(Configuration(p, 1, 1, 1, name, v, 1, 1, m, "none", False, "even"))
            assert few is not None
            assert few < 4 * p
            assert follows(name, p, m, v) <= follows(name, p, few, v), (v, m, few)
