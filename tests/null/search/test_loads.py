"""Bounds of many schedules and cuts at once are those of each by itself."""

from __future__ import annotations

from random import Random

import pytest

from piper_core.arch.record import Architecture
from piper_core.schedule.grid import Layout, rows_of_stage
from search.loads import Choice
from search.partial_bound import overlaps
from search.space import Configuration
from search.stage_costs import _spread, balanced_rows
from tests.null.search.spaces import DENSE, MIXED, MOE, WIDE_HEAD, case, leaves

FIX = ["cp=1,2", "bucket=1", "prefetch=1", "streams=own", "recompute=none,selective,full,1,2"]


@pytest.mark.parametrize("architecture", [DENSE, WIDE_HEAD, MOE, MIXED])
def test_the_bounds_of_many_are_those_of_each(architecture: Architecture) -> None:
    """No less where all layers are alike; never more."""
    it = case(architecture, "p4de", 8, 48, 512, FIX)
    bounds, parts = it.problem.bounds, dict[tuple[object, ...], list[Configuration]]()
    for config in Random(1).sample(list(leaves(it.space)), 400):
        degrees = config.pp, config.tp, config.dp, config.ep, config.cp, config.outer
        key = *degrees, config.micro_batch, config.recompute, config.sequence_parallel, overlaps(config)
        parts.setdefault(key, []).append(config)
    assert any(overlaps(configs[0]) for configs in parts.values())
    assert max(map(len, parts.values())) > 3
    for configs in parts.values():
        choices = [Choice(c.schedule, c.virtual_stages, bounds.costs.of(c)[0], c.recompute) for c in configs]
        found, each = bounds.busy_bounds(configs[0], choices).tolist(), [bounds.busy_bound(c) for c in configs]
        assert all(least <= own * (1 + 1e-12) for least, own in zip(found, each, strict=True))
        if len(bounds.costs.kinds) == 1:
            assert found == pytest.approx(each, rel=1e-12)
        else:
            assert found == pytest.approx(each, rel=0.05)


def test_layers_are_spread_as_one_by_one() -> None:
    """Whether the first ones are given at once or one after another."""
    random, many = Random(2), 0
    for _ in range(3000):
        layout, pp = random.choice([Layout.LOOP, Layout.V]), random.choice([1, 2, 3, 4, 8])
        rows = rows_of_stage(layout, pp, v := 2 if layout is Layout.V else random.randint(1, 6))
        layers = len(rows) + random.randint(0, 100)
        weights = round(random.choice([0.0, 3 * random.random()]), 3), 1.0, round(6 * random.random(), 3)
        assert balanced_rows(layers, layout, pp, v, weights) == _spread(layers, pp, rows, weights, 1)
        many += layers > 6 * len(rows)
    assert many > 500
