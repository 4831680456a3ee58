"""The Piper paper's headline results (arXiv 2606.11169): sequence 512, microbatch 4, 2 p microbatches."""

from __future__ import annotations

import pytest

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.predict import quick
from search.request import Request


def step_s(model: str, schedule: str, v: int, **degrees: int) -> float:
    cluster = load_cluster("p4de")
    request = Request(
        preset(model), cluster, seq_len=512, micro_batch=4, num_microbatches=2 * degrees["pp"], schedule=schedule,
        virtual_stages=v, **degrees,
    )  # fmt: skip
    return quick(request).score.step_time_s


@pytest.mark.parametrize(
    ("model", "other", "v", "degrees", "measured"),
    [
        ("piper-1b", "1f1b", 1, {"pp": 2, "ep": 2, "dp": 2}, 0.13),
        ("piper-9b", "interleaved_1f1b", 2, {"pp": 8, "ep": 4, "dp": 4}, 0.10),
    ],
)
def test_gain_of_dualpipev(model: str, other: str, v: int, degrees: dict[str, int], measured: float) -> None:
    gain = step_s(model, other, v, **degrees) / step_s(model, "dualpipev", 2, **degrees) - 1
    assert gain == pytest.approx(measured, abs=0.04)
