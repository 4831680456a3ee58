"""What a request leaves out is inferred; what does not go together is refused, with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from piper_core.errors import ConfigError, ScheduleError
from profiler.spec import load_cluster
from search.request import Request
from tests.null.search.spaces import DENSE, MOE, TIED

CLUSTER = load_cluster("p4de")


def request(architecture: Any = DENSE, **fields: Any) -> Request:
    return Request(architecture, CLUSTER, **({"seq_len": 512, "global_batch": 64} | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpus": 8}, {"pp": 1, "tp": 1, "dp": 8, "cp": 1, "micro_batch": 1, "num_microbatches": 8}),
        ({"gpus": 16, "pp": 2, "tp": 2}, {"dp": 4, "num_microbatches": 16}),
        ({"pp": 2, "tp": 2, "dp": 4}, {"dp": 4}),
        ({"gpus": 16, "pp": 2, "dp": 4, "cp": 1}, {"tp": 2}),
        ({"gpus": 16, "tp": 2, "dp": 4, "cp": 1}, {"pp": 2}),
        ({"gpus": 8, "cp": 4, "pp": 2}, {"dp": 1, "cp": 4}),
        ({"gpus": 4, "micro_batch": 4}, {"num_microbatches": 4}),
        ({"gpus": 4, "num_microbatches": 2}, {"micro_batch": 8}),
        ({"gpus": 4, "global_batch": None, "num_microbatches": 2, "micro_batch": 3}, {"micro_batch": 3}),
        ({"gpus": 4, "pp": 2, "virtual_stages": 2}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
        ({"gpus": 4, "pp": 2, "schedule": "zbv"}, {"schedule": "zbv", "virtual_stages": 2}),
        ({"gpus": 2, "pp": 2, "zero": 3}, {"zero": 0}),
        ({"gpus": 2, "cp": 2, "zero": 3}, {"zero": 3}),
        ({"gpus": 4, "sequence_parallel": True}, {"sequence_parallel": False}),
    ],
)
def test_inferred(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = request(**fields).resolve()
    assert {name: getattr(config, name) for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gpus": 10, "pp": 4}, "10 GPUs are not divisible by pp 4 = 4; 8 or 12 GPUs would do"),
    ({"gpus": 2, "pp": 4}, "2 GPUs are not divisible by pp 4 = 4; 4 GPUs would do"),
    ({"gpus": 16, "dp": 4}, "leave a factor of 4; say which of pp, tp, cp takes the rest"),
    ({"gpus": 16, "pp": 2, "dp": 2, "tp": 2, "cp": 1}, "leave a factor of 2; change one of them"),
    ({"gpus": 2**21}, "more than 1048576"),
    ({"gpus": 6}, "global batch 64 is not divisible by dp 6; 60 or 66 would do, or dp one of 1, 2, 4, 8"),
    ({"gpus": 8, "micro_batch": 3}, "8 sequences, which are not divisible by micro_batch 3; 1, 2, 4, 8 would do"),
    ({"gpus": 8, "num_microbatches": 5}, "not divisible by num_microbatches 5; 1, 2, 4, 8 would do"),
    ({"gpus": 8, "micro_batch": 2, "num_microbatches": 2}, "x 4 microbatches, not 2"),
    ({"gpus": 8, "global_batch": None}, "give the global batch"),
    ({"gpus": 0}, "gpus must be at least 1, found 0"),
    ({"gpus": 8, "outer": "tp"}, "outer must be pp or dp"),
    ({"gpus": 8, "prefetch": 0}, "prefetch must be at least 1"),
    ({"gpus": 8, "zero": 4}, "zero must be 0, 1, 2 or 3"),
    ({"gpus": 8, "recompute": "some"}, "recompute must be none, selective, full or a number"),
    ({"gpus": 8, "recompute": "0"}, "recompute of 0 layers"),
    ({"gpus": 8, "recompute": "11"}, "give 1 to 10"),
    ({"gpus": 8, "seq_len": 100_000}, "longer than small-dense allows"),
    ({"gpus": 8, "tp": 8}, "legal degrees are 1, 2, 4"),
    ({"gpus": 8, "cp": 4, "seq_len": 510}, "legal degrees are 1, 3, 5"),
    ({"gpus": 8, "ep": 2}, "small-dense has no experts"),
    ({"gpus": 8, "ep": 8, "architecture": MOE}, "1, 2, 4 would do"),
    ({"gpus": 16, "pp": 16}, "pp 16 is more than the 10 layers"),
    ({"gpus": 8, "pp": 8, "virtual_stages": 2}, "16 stages are more than the 10 layers"),
    ({"gpus": 4, "pp": 4, "layers": (3, 3, 4)}, "give 4 of at least 1 with sum 10"),
    ({"gpus": 4, "pp": 4, "layers": (3, 0, 3, 4)}, "give 4 of at least 1 with sum 10"),
    ({"gpus": 4, "pp": 4, "layers": "odd"}, "even, balanced or a list"),
    ({"gpus": 4, "pp": 2, "schedule": "zero_bubble"}, "no schedule family 'zero_bubble'"),
    ({"gpus": 4, "pp": 2, "schedule": "dualpipe", "zero": 2}, "ZeRO-2 needs each stage on one row"),
    ({"gpus": 4, "pp": 2, "schedule": "dualpipe", "architecture": TIED}, "tied embedding"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        request(**fields).resolve()
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"gpus": 3, "pp": 3, "schedule": "dualpipe"}, "p=2 or p=4"),
        ({"gpus": 8, "pp": 4, "schedule": "dualpipev", "micro_batch": 32}, "m=8"),
        ({"gpus": 4, "pp": 4, "schedule": "zbv", "virtual_stages": 3}, "v=2"),
    ],
)
def test_schedules_say_what_they_are_defined_for(fields: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ScheduleError, match=nearest):
        request(**fields).resolve()
