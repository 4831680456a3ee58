"""A step of many microbatches is what two shorter ones say."""

from __future__ import annotations

from typing import Any

import pytest

from piper_core.schedule.families import FAMILIES
from profiler.spec import load_cluster
from search.long_step import predict_score
from search.predict import predict
from search.request import Request
from search.rounds import WHOLE, rounds
from tests.null.search.spaces import DENSE, MOE

CLUSTER = load_cluster("p4de")
CASES: list[dict[str, Any]] = [
    {"schedule": name, "pp": 2, "gpus": 4, "zero": 1} for name in FAMILIES if name not in WHOLE
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
    m = 107 if more.get("pp") == 3 else 106  # no whole number of rounds of four times the rows
    request = Request(architecture, CLUSTER, seq_len=512, num_microbatches=m, micro_batch=1, **more)
    assert rounds(request.resolve()) is not None
    short, whole = predict_score(request), predict(request).score
    near = 1e-3 if more.get("zero", 0) >= 2 else 1e-9  # contention settles more slowly
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=near)
    assert short.tokens_per_s_per_gpu == pytest.approx(whole.tokens_per_s_per_gpu, rel=near)
    assert (short.mfu, short.model_tflops_per_gpu) == pytest.approx((whole.mfu, whole.model_tflops_per_gpu), rel=near)
    assert short.bubble_ratio == pytest.approx(whole.bubble_ratio, abs=near)
    assert short.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=1e-9)
    assert short.fits == whole.fits
    assert short.breakdown == pytest.approx(whole.breakdown, abs=max(near, 1e-9) * whole.step_time_s)


def test_short_steps_and_some_families_are_taken_whole() -> None:
    many: list[dict[str, Any]] = [{"num_microbatches": 200, "schedule": name} for name in WHOLE]
    for fields in ({"num_microbatches": 16}, *many):
        request = Request(DENSE, CLUSTER, seq_len=512, gpus=2, pp=2, micro_batch=1, **fields)
        assert rounds(request.resolve()) is None
        assert predict_score(request) == predict(request).score
