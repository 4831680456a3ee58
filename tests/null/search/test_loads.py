"""Bounds of many schedules and cuts at once are those of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from piper_core.arch.record import Architecture
from piper_core.schedule.grid import Layout, rows_of_stage
from search.loads import Choice
from search.partial_bound import overlaps
from search.space import Configuration
from search.stage_costs import balanced_rows
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


@pytest.mark.parametrize("architecture", [DENSE, WIDE_HEAD, MOE, MIXED])
def test_the_floors_of_many_numbers_of_layers_are_those_of_each(architecture: Architecture) -> None:
    it = case(architecture, "p4de", 8, 48, 512, FIX)
    bounds, policies, seen = it.problem.bounds, ("1", "2", "3", "5"), 0
    for config in Random(3).sample([c for c in leaves(it.space) if c.recompute in policies], 60):
        each = [replace(config, recompute=policy) for policy in policies]
        for gap in (0.0, 0.4):
            family = bounds.floors(config, policies, gap, any_order=False).tolist()
            assert family == pytest.approx([bounds.memory_floor(c, gap) for c in each], rel=1e-12)
            every = bounds.floors(config, policies, gap, any_order=True).tolist()
            assert every == pytest.approx([bounds.any_order_floor(c, gap) for c in each], rel=1e-12)
        seen += family[0] > family[-1] > every[-1]
    assert seen > 0


def busiest(homes: Sequence[Sequence[int]], counts: Sequence[int], embed: float, head: float) -> float:
    """Return the load of the busiest row."""
    load = [0.0] * (1 + max(map(max, homes)))
    for s, (home, n) in enumerate(zip(homes, counts, strict=True)):
        for row in home:
            load[row] += (n + embed * (s == 0) + head * (s == len(homes) - 1)) / len(home)
    return max(load)


def test_no_spread_of_layers_makes_the_busiest_row_lighter() -> None:
    random = Random(2)
    for _ in range(300):
        layout, pp = random.choice([(Layout.LOOP, 2), (Layout.LOOP, 3), (Layout.V, 2), (Layout.BIDIRECTIONAL, 4)])
        v = {Layout.V: 2, Layout.BIDIRECTIONAL: 1}.get(layout, random.randint(1, 2))
        homes = rows_of_stage(layout, pp, v)
        layers = len(homes) + random.randint(0, 4)
        embed, head = round(random.choice([0.0, 3 * random.random()]), 3), round(3 * random.random(), 3)
        found = balanced_rows(layers, layout, pp, v, (embed, 1.0, head))
        every = [each for each in product(range(1, 6), repeat=len(homes)) if sum(each) == layers]
        assert sum(found) == layers
        least = min(busiest(homes, each, embed, head) for each in every)
        assert busiest(homes, found, embed, head) == pytest.approx(least)
