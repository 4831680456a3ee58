"""Bounds never exceed what building and simulating a configuration gives."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from piper_core.arch.record import Architecture
from piper_core.errors import InfeasibleError
from piper_core.schedule.families import FAMILIES
from search.direct.order import order_of
from search.list_order import list_grids
from search.space import Configuration
from tests.null.search.spaces import DENSE, MIXED, MOE, SHARED, TIED_BIAS, WIDE_HEAD, Case, case, leaves

SLACK = 1 + 1e-9
FEW = ("cp=1,2", "bucket=1,4,0", "prefetch=1,3", "recompute=none,selective,full,1,2")
EACH = 48
CASES = [
    (DENSE, "p4d", 8, 32, 512),
    (DENSE, "p4de", 16, 64, 2048),
    (WIDE_HEAD, "p4d", 16, 64, 256),
    (MOE, "p4d", 16, 64, 1024),
    (SHARED, "p4de", 8, 48, 512),
    (MIXED, "p4de", 8, 48, 512),
    (TIED_BIAS, "p4de", 8, 24, 512),
]


def sample(it: Case, n: int, seed: int) -> list[Configuration]:
    """Return ``n`` configurations, evenly over schedules and ZeRO stages."""
    rng, by = Random(seed), dict[tuple[str, int], list[Configuration]]()
    for config in leaves(it.space):
        by.setdefault((config.schedule, config.zero), []).append(config)
    keys = sorted(by)
    return [rng.choice(by[keys[i % len(keys)]]) for i in range(n)]


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len"), CASES)
def test_bounds_are_below_the_simulated_step(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int
) -> None:
    it = case(architecture, cluster, gpus, batch, seq_len, FEW)
    bounds = it.problem.bounds
    for config in sample(it, EACH, seed=gpus):
        score = it.problem.score(config)
        seconds, size = bounds.partial(config)
        times = bounds.time_bound(config), bounds.replay(config), score.step_time_s
        assert max(bounds.busy_bound(config), bounds.order_bound(config)) <= times[1] * SLACK
        sizes = bounds.memory_floor(config), bounds.memory_of_order(config), score.worst_row_bytes
        assert seconds <= score.step_time_s * SLACK, (str(config), seconds, score.step_time_s)
        assert size <= score.worst_row_bytes * SLACK, (str(config), size, score.worst_row_bytes)
        held = bounds.time_bound(config, 0.0, score.worst_row_bytes * SLACK)
        assert held <= score.step_time_s * SLACK, (str(config), held, score.step_time_s)
        loose = bounds.replay(replace(config, bucket=0))
        assert loose <= score.step_time_s * SLACK, (str(config), loose, score.step_time_s)
        for low, high in (*pairwise(times), *pairwise(sizes)):
            assert low <= high * SLACK, (str(config), times, sizes)


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len"), CASES[:4])
def test_bounds_hold_for_other_orders_too(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int
) -> None:
    """The list scheduler's orders, with weight gradients apart and at once, with little memory and with all."""
    it = case(architecture, cluster, gpus, batch, seq_len, FEW)
    bounds, direct, met = it.problem.bounds, it.problem.direct, 0
    for config in sample(it, EACH, seed=gpus + 1):
        if config.pp == 1 or config.num_microbatches > 16 or not direct.covers(config):
            continue
        need = bounds.any_order_floor(config)
        for room in (1.1 * need, 2.0 * need):
            tight = copy(bounds)
            tight.capacity_bytes = room
            try:
                grids = list_grids(config, tight, effort=0)
            except InfeasibleError:
                continue
            for grid in grids:
                score = direct.assess(config, order_of(grid, config.stages, config.num_microbatches)).score
                floor = bounds.any_order_floor(config)
                assert floor <= score.worst_row_bytes * SLACK, (str(config), floor, score.worst_row_bytes)
                least = bounds.time_bound(config, 0.0, score.worst_row_bytes * SLACK)
                assert least <= score.step_time_s * SLACK, (str(config), least, score.step_time_s, str(grid))
                met += 1
    assert met > 20


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len"), CASES)
def test_a_sequence_takes_least_time_in_the_largest_microbatch(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int
) -> None:
    """What the bound of degrees alone relies on."""
    it = case(architecture, cluster, gpus, batch, seq_len)
    for pp, tp, dp, ep, cp, outer in it.space.degrees():
        for sequence in it.space.sequence(tp, cp):
            times = [
                it.problem.bounds.degrees(
                    Configuration(pp, tp, dp, ep, "dualpipev", 1, 0, b, m, "none", sequence, "", cp, outer)
                )[0]
                for b, m in it.space.batches(dp)
            ]
            assert times[-1] <= min(times) * SLACK


def test_the_sample_meets_every_choice() -> None:
    """All that the space can vary occurs in the sample above."""
    met: Counter[tuple[object, ...]] = Counter()
    for architecture, cluster, gpus, batch, seq_len in CASES:
        for config in sample(case(architecture, cluster, gpus, batch, seq_len, FEW), EACH, seed=gpus):
            met.update([("schedule", config.schedule, config.zero), ("recompute", config.recompute)])
            met.update([("cp", config.cp), ("outer", config.outer), ("bucket", config.bucket)])
            met.update([("streams", config.streams)])
            met.update([("tp", config.tp > 1, config.sequence_parallel), ("ep", config.ep > 1), ("cuts", config.cuts)])
    assert len(CASES) * EACH >= 150
    for schedule in FAMILIES:
        assert all(met["schedule", schedule, zero] for zero in (range(2) if schedule == "dualpipe" else range(4)))
    choices: list[tuple[object, ...]] = [
        *(("recompute", policy) for policy in ("none", "selective", "full", "1", "2")),
        *(("cp", degree) for degree in (1, 2)),
        *(("outer", axis) for axis in ("pp", "dp")),
        *(("bucket", layers) for layers in (0, 1, 4)),
        *(("streams", names) for names in ("own", "data", "all")),
        ("tp", True, True),
        ("tp", True, False),
    ]
    choices += [("tp", False, False), ("ep", True), ("ep", False), ("cuts", "even"), ("cuts", "balanced")]
    for choice in choices:
        assert met[choice] >= 10, choice
