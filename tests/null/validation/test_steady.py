"""Law: a long step from short ones takes as long, and needs as much memory, as the long one itself."""

from __future__ import annotations

import pytest

from piper_core.arch import preset
from piper_core.names import Sync
from profiler.spec import load_cluster
from search.predict import predict
from search.request import Request
from search.steady import long_step

DGX = load_cluster("dgx-a100")


@pytest.mark.parametrize("sync", [Sync.GLOBAL_NORM, Sync.POST_VALIDATION])
@pytest.mark.parametrize(
    ("family", "pp", "v", "zero"),
    [
        ("1f1b", 1, 1, 0),
        ("1f1b", 1, 1, 3),
        ("1f1b", 4, 1, 1),
        ("1f1b", 2, 1, 2),
        ("gpipe", 2, 1, 1),
        ("interleaved_1f1b", 2, 4, 1),
        ("zb_h1", 4, 1, 0),
        ("zb_h2", 4, 1, 0),
        ("zbv", 2, 2, 1),
        ("v_half", 4, 2, 0),
        ("dualpipev", 2, 2, 1),
    ],
)
def test_a_long_step_from_short_ones(family: str, pp: int, v: int, zero: int, sync: Sync) -> None:
    request = Request(
        preset("tiny-llama"), DGX, pp=pp, tp=2, dp=2, schedule=family, virtual_stages=v, zero=zero, micro_batch=1,
        num_microbatches=24, seq_len=512, sync=sync,
    )  # fmt: skip
    whole, found = predict(request).score, long_step(request)
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=1e-6)
    assert found.short.worst_row_bytes == pytest.approx(whole.worst_row_bytes, rel=0.01)
    assert found.short.fits == whole.fits


def test_a_stage_may_hold_the_embedding_or_the_head_alone() -> None:
    """As the zero-bubble paper's interleaved runs do; the row that holds neither is then the busiest."""
    request = Request(preset("tiny-llama"), DGX, pp=4, num_microbatches=8, micro_batch=1, seq_len=512,
                      layers=(0, 4, 4, 0))  # fmt: skip
    found = predict(request)
    assert found.compiled.dag.stages == 4
    busy = found.simulation.busy_s
    assert busy[1] > busy[0]
    assert busy[2] > busy[0]
