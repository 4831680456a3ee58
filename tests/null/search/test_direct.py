"""Law: the direct lowering says of a configuration what apply, plan and lower say, to the bit or to 1e-12."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from piper_core import preset
from piper_core.errors import DirectiveError, InfeasibleError
from piper_core.schedule.compile import Compiled
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from piper_core.schedule.lower import lower
from profiler.spec import load_cluster
from search.candidate import Score
from search.cost.price import node_seconds
from search.cost.roofline import RooflineCost
from search.cost.software import Software
from search.direct.kinds import kinds_of
from search.direct.score import Direct
from search.engine import search
from search.evaluate import Evaluation, assess
from search.problem import Problem
from search.rounds import representative
from search.simulator.lower import action_seconds
from search.space import BUCKETS, CUTS, OUTERS, PREFETCHES, STREAMS, Configuration, Space, parse_fix
from tests.null.search.alike import differences

SEQ_LEN, BATCH = 512, 48
MODELS = {
    "dense": (preset("tiny-llama"), 16),
    "tied": (replace(preset("tiny-llama"), tied=True, name="tied"), 16),
    "mixture": (preset("tiny-moe"), 16),
    "uneven": (preset("tiny-moe"), 12),
}
EACH = 7
"""Configurations of each family of each model."""
COLUMNS = ("start", "kind", "stage", "microbatch", "bucket", "line", "wait_start", "waits")


@cache
def problem(name: str) -> Problem:
    architecture, gpus = MODELS[name]
    return Problem(architecture, load_cluster("p4de"), gpus, BATCH, SEQ_LEN)


def direct(problem: Problem) -> Direct:
    return Direct(problem.architecture, problem.model, problem.cluster, problem.cost, problem.bounds)


@cache
def drawn(name: str) -> tuple[Configuration, ...]:
    """Return configurations of every family that a model can have, all other axes drawn."""
    architecture, gpus = MODELS[name]
    cluster = load_cluster("p4de")
    space = Space(architecture, gpus, cluster.gpus_per_node, BATCH, SEQ_LEN, {})
    rng, found = Random(len(name)), list[Configuration]()
    degrees = list(space.degrees())
    for schedule in FAMILIES:
        made = 0
        while made < EACH:
            d = rng.choice(degrees)
            legal = [
                (v, b, m) for family, v in space.schedules(d.pp) if family == schedule
                for b, m in space.batches(d.dp) if m in FAMILIES[family].microbatches(d.pp, v) and m <= 12
            ]  # fmt: skip
            if not legal and schedule in dict(s for d in degrees for s in space.schedules(d.pp)):
                continue
            made += 1
            if legal:
                found.append(_draw(space, rng, d, schedule, *rng.choice(legal)))
    return tuple(dict.fromkeys(found))


def _draw(space: Space, rng: Random, d: Any, schedule: str, v: int, b: int, m: int) -> Configuration:
    layout = FAMILIES[schedule].layout
    stages = d.pp * (1 if layout is Layout.BIDIRECTIONAL else v)
    zero = rng.choice(space.zeros(d.dp * d.cp, schedule))
    order = rng.choice(["family", "family", "list"]) if d.pp > 1 and m > 1 else "family"
    return Configuration(
        d.pp, d.tp, d.dp, d.ep, schedule, v, zero, b, m, rng.choice(space.recomputes() + space.counts(stages)[:2]),
        rng.choice(space.sequence(d.tp, d.cp)), rng.choice(space.cuts(stages)), d.cp, d.outer,
        *rng.choice(space.fine(d.dp * d.cp, zero, d.ep, layout)), order=order,
    )  # fmt: skip


def long_way(problem: Problem, config: Configuration) -> tuple[Compiled, Evaluation] | str:
    """Return what apply, plan and lower say, or why there is no such order."""
    try:
        program, mesh, _ = problem.program(config)
    except InfeasibleError as error:
        return str(error)
    dag = program.apply(problem.base, mesh)
    compiled = Compiled(dag, lower(dag))
    return compiled, assess(
        compiled, problem.cost, problem.cluster.device, seq_len=problem.seq_len, gpus=problem.gpus,
        global_batch=problem.global_batch, architecture=problem.architecture,
    )  # fmt: skip


ALSO = {
    "uneven": [  # weight gradients right after a backward whose last collective runs beside compute
        Configuration(3, 2, 2, 1, "dualpipev", 2, 2, 3, 8, "full", True, "even", outer=outer, order="list")
        for outer in OUTERS
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_direct_lowering_is_apply_plan_and_lower(name: str) -> None:
    given = problem(name)
    quick, covered = direct(given), 0
    for config in (*drawn(name), *ALSO.get(name, ())):
        if not quick.covers(config):
            continue
        covered += 1
        expected = long_way(given, config)
        if isinstance(expected, str):
            with pytest.raises(InfeasibleError) as caught:
                quick.assess(config)
            assert str(caught.value) == expected
            continue
        compiled, evaluation = expected
        plan, built = compiled.plan, quick.build(config)
        different = [
            column for column in COLUMNS if not np.array_equal(getattr(plan, column), getattr(built.plan, column))
        ]
        assert not different, f"{config}: {different}"
        assert plan.streams == built.plan.streams, str(config)
        assert plan.rows == built.plan.rows, str(config)
        seconds = action_seconds(compiled.dag, plan, node_seconds(compiled.dag, given.cost))
        assert np.array_equal(seconds.total, built.seconds.total), str(config)
        assert np.array_equal(seconds.comm, built.seconds.comm), str(config)
        found = quick.assess(config)
        assert found.score.step_time_s == evaluation.score.step_time_s, str(config)
        assert not differences(asdict(found.score), asdict(evaluation.score)), str(config)
        assert not differences(
            [asdict(row) for row in found.memory.rows], [asdict(row) for row in evaluation.memory.rows]
        ), str(config)
    assert covered > 0.9 * len(drawn(name))


def test_every_value_of_every_axis_is_drawn() -> None:
    configs = [config for name in MODELS for config in drawn(name)]
    assert len(configs) >= 250
    values = {name: {getattr(config, name) for config in configs} for name in Configuration.__slots__}
    assert values["schedule"] == set(FAMILIES)
    assert values["zero"] == {0, 1, 2, 3}
    assert values["recompute"] >= {"none", "selective", "full", "1", "2"}
    assert values["sequence_parallel"] == {True, False}
    assert values["order"] == {"family", "list"}
    for axis, domain in (
        ("cuts", CUTS), ("outer", OUTERS), ("bucket", BUCKETS), ("prefetch", PREFETCHES), ("streams", STREAMS),
    ):  # fmt: skip
        assert values[axis] == set(domain), axis
    for axis in ("pp", "tp", "dp", "ep", "cp", "virtual_stages", "micro_batch", "num_microbatches"):
        assert len(values[axis]) >= 3, axis
    talking = [
        c for c in configs if c.schedule.startswith("dualpipe") and c.tp * c.cp * c.ep > 1 and c.order == "family"
    ]
    assert len(talking) >= 20


def test_what_is_not_covered_goes_the_long_way() -> None:
    given = problem("dense")
    config = next(config for config in drawn("dense") if config.order == "family")
    other = RooflineCost(given.cluster, Software(message_hold_s=1e-3))
    assert direct(given).covers(config)
    assert not Direct(given.architecture, given.model, given.cluster, other, given.bounds).covers(config)


def test_data_that_crosses_layers_otherwise_is_not_covered() -> None:
    model = problem("dense").model
    assert kinds_of(model) is not None
    assert kinds_of(replace(model, edges=(*model.edges, (0, len(model.chunks) - 1, 1.0)))) is None


def test_rows_that_lie_on_nodes_differently_are_not_covered_where_they_share_a_stage() -> None:
    architecture = replace(preset("tiny-moe"), experts=6, name="six-experts")
    given = Problem(architecture, load_cluster("p4de"), 12, BATCH, SEQ_LEN)
    config = Configuration(4, 1, 3, 3, "dualpipe", 1, 0, 1, 16, "none", False, "balanced")  # row 2 is ranks 6, 7 | 8
    assert not direct(given).covers(config)
    assert direct(given).covers(replace(config, schedule="1f1b"))
    assert not isinstance(long_way(given, config), str)


def test_what_is_reported_was_applied_and_proved_to_run() -> None:
    proved: list[Configuration] = []

    class Watched(Problem):
        def confirmed(self, config: Configuration) -> Score:
            proved.append(config)
            return super().confirmed(config)

    given = Watched(preset("tiny-llama"), load_cluster("p4de"), 4, 16, SEQ_LEN)
    space = Space(given.architecture, 4, 8, 16, SEQ_LEN, parse_fix(["pp=2", "zero=1", "b=2", "cuts=even", "cp=1"]))
    found = search(given, space, top=4, budget_s=1e6, workers=1, tune=False)
    assert {candidate.config for candidate in found.candidates[:4]} <= set(proved)
    assert len(found.candidates) > 4 > len(proved) - len(found.candidates)


def test_a_candidate_that_apply_refuses_is_none() -> None:
    class Doubting(Problem):
        def confirmed(self, config: Configuration) -> Score:
            if config.schedule == "1f1b":
                raise DirectiveError("refused")
            return super().confirmed(config)

    given = Doubting(preset("tiny-llama"), load_cluster("p4de"), 4, 16, SEQ_LEN)
    space = Space(
        given.architecture,
        4,
        8,
        16,
        SEQ_LEN,
        parse_fix(["pp=2", "zero=1", "b=2", "cuts=even", "cp=1", "schedule=1f1b,zb_h1"]),
    )
    found = search(given, space, top=100, budget_s=1e6, workers=1, tune=False)
    assert found.rejected > 0
    assert {candidate.config.schedule for candidate in found.candidates} == {"zb_h1"}
    assert sum(found.pruned.values()) + len(found.candidates) == found.size


def test_a_long_step_is_proved_by_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.problem.LONG", 100)
    given = Problem(preset("tiny-llama"), load_cluster("p4de"), 4, 96, SEQ_LEN)
    config = Configuration(2, 1, 2, 1, "1f1b", 1, 1, 1, 48, "none", False, "balanced")
    assert given._long(config)
    assert representative(config) == 6
    assert given.confirmed(config) == given.score(config)
    assert not differences(asdict(given._slow(config)), asdict(given.score(config)), within=1e-6)
