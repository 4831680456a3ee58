"""Plans of one form are made once: what is shared is what would be made anew."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from piper_core.schedule.grid import Layout
from search.direct.plan import Builder
from search.space import Configuration
from tests.null.search.test_direct import COLUMNS, MODELS, direct, drawn, problem


def variants(config: Configuration) -> list[Configuration]:
    """Return a configuration and others of the same order that differ in one thing."""
    one_row = config.layout is not Layout.BIDIRECTIONAL
    found = [config, *(replace(config, recompute=policy) for policy in ("none", "selective", "full", "1"))]
    found += [replace(config, micro_batch=2 * config.micro_batch), replace(config, bucket=0 if config.bucket else 1)]
    found += [replace(config, outer=outer) for outer in ("pp", "dp")]
    found += [replace(config, streams=streams) for streams in ("own", "data", "all")]
    found += [replace(config, zero=zero, prefetch=ahead) for zero in range(4 if one_row else 2) for ahead in (1, 2)]
    if config.tp > 1:
        found.append(replace(config, sequence_parallel=not config.sequence_parallel))
    if config.dp % 2 == 0 and config.ep == 1:
        found.append(replace(config, dp=config.dp // 2, cp=2 * config.cp))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", MODELS)
def test_a_form_that_others_made_is_the_one_that_would_be_made(name: str) -> None:
    given = problem(name)
    shared, made, asked = direct(given), 0, 0
    for config in [each for each in drawn(name) if each.order == "family"][::4]:
        for each in filter(shared.covers, variants(config)):
            alone = direct(given)
            found, expected = shared.build(each), alone.build(each)
            asked += 1
            for column in COLUMNS:
                assert np.array_equal(getattr(found.plan, column), getattr(expected.plan, column)), f"{each}: {column}"
            assert found.plan.streams == expected.plan.streams, str(each)
            assert found.plan.rows == expected.plan.rows, str(each)
            assert found.seconds.total.tolist() == expected.seconds.total.tolist(), str(each)
            assert asdict(shared.score(each)) == asdict(alone.score(each)), str(each)
        made += len(shared.builder.forms)
        shared.builder.forms.cache_clear()
    assert made < asked * 0.8, "few forms were shared: what is this test of?"


def test_forms_are_kept_up_to_so_many_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("dense")
    built = direct(given)
    assert built.steps is not None
    monkeypatch.setattr("search.direct.plan.KEPT", 2000)
    built.builder = Builder(built.steps.prices, built.builder.sync)
    for config in drawn("dense"):
        if built.covers(config) and config.order == "family":
            size = len(built.build(config).form)
            assert built.builder.forms.size <= max(2000, size)
    assert len(built.builder.forms) > 1
