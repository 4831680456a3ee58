"""Law: without a DAG a request is predicted as by apply, plan and lower, whatever it names and whoever's habits."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from piper_core.arch import preset
from piper_core.errors import PiperError
from piper_core.names import Sync
from profiler.spec import load_cluster
from search.cost.software import OWN, Software
from search.direct.asked import Asked
from search.predict import predict, quick
from search.request import Request
from search.validation.facts import FITS, SMALL, STEPS, load_facts
from search.validation.rows import request_of
from tests.null.search.alike import differences

BASE = Request(preset("tiny-llama"), load_cluster("dgx-a100"), pp=4, tp=2, dp=4, micro_batch=2, num_microbatches=8,
               seq_len=512)  # fmt: skip
ONE_IN = {STEPS: 11, FITS: 19, SMALL: 60}
"""Every so many rows of a published table."""


def same(request: Request) -> None:
    """Compare both ways."""
    one, other = quick(request), predict(request, proved=False)
    assert not differences(asdict(one.score), asdict(other.score))
    rows = ([asdict(row) for row in memory.rows] for memory in (one.memory, other.memory))
    assert not differences(list(next(rows)), list(next(rows)))


@pytest.fixture
def covered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was asked whether it is covered, and was."""
    said: list[bool] = []
    covers = Asked.covers

    def watched(self: Asked, config: object) -> bool:
        said.append(covers(self, config))  # type: ignore[arg-type]
        return said[-1]

    monkeypatch.setattr(Asked, "covers", watched)
    return said


@pytest.mark.parametrize("name", ONE_IN)
def test_published_runs(name: str, covered: list[bool]) -> None:
    frameworks = set()
    for row in load_facts(name)[:: ONE_IN[name]]:
        try:
            request = request_of(row)
            config = request.resolve()
        except PiperError:
            continue
        m = min(config.num_microbatches, 2 * config.pp + 3)
        same(replace(request, num_microbatches=m, global_batch=m * config.dp * config.micro_batch))
        frameworks.add(row["framework"])
    assert all(covered)
    assert len(covered) >= 6
    assert len(frameworks) >= (6 if name == STEPS else 1)


@pytest.mark.parametrize(
    "software",
    [
        Software(gradient_bytes=2),
        Software(separate_gate=True),
        Software(hides_backward=True),
        Software(keeps_gathered=True),
        Software(gathers_logits=True),
        Software(shard_group=2),
        Software(message_hold_s=1e-3),
        Software(blocks_messages=True),
        Software(2, True, True, True, True, 2, 1e-3, True),
    ],
)
@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("dualpipev", 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_habit(software: Software, schedule: str, v: int, zero: int, covered: list[bool]) -> None:
    same(
        replace(
            BASE, software=software, schedule=schedule, virtual_stages=v, zero=zero, sequence_parallel=zero % 2 == 1,
            recompute=("none", "selective", "full", "1")[zero],
        )
    )  # fmt: skip
    assert covered == [True]


@pytest.mark.parametrize(
    "asked",
    [
        {"layers": (0, 2, 4, 2)},
        {"layers": "balanced"},
        {"bucket_mib": 0},
        {"bucket_mib": 1, "zero": 3},
        {"sync": Sync.POST_VALIDATION, "schedule": "zb_h2"},
        {"sync": Sync.NONE},
        {"outer": "dp"},
        {"prefetch": 2, "zero": 3},
    ],
)
def test_what_no_configuration_names(asked: dict[str, object], covered: list[bool]) -> None:
    same(replace(BASE, **asked))  # type: ignore[arg-type]
    assert covered == [True]


def test_what_is_not_covered_goes_the_long_way(covered: list[bool]) -> None:
    """Two rows hold a stage; or neighbours that share state lie otherwise in each group."""
    same(replace(BASE, schedule="dualpipe", virtual_stages=1, software=Software(gradient_bytes=2)))
    uneven = replace(BASE, pp=1, tp=1, dp=12, software=Software(shard_group=4), zero=1)
    same(uneven)
    same(replace(uneven, software=OWN))
    assert covered == [False, False, True]
