"""The space: what it yields is legal, builds and runs; ``--fix`` and its errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError, InfeasibleError
from piper_core.schedule.families import FAMILIES
from search.empty import why_empty
from search.generators.best_first import BestFirst
from search.space import FIXABLE, Configuration, Space, divisors, parse_fix
from search.stage_costs import mesh_of
from tests.null.search.spaces import DENSE, MOE, PLAIN, SHARED, TIED, TIED_BIAS, case, leaves
from tests.null.search.test_bound import sample

CASES: list[tuple[Architecture, str, int, int, int, Sequence[str]]] = [
    (DENSE, "p4d", 6, 6, 512, []),
    (DENSE, "p4d", 12, 24, 512, ["recompute=none,selective,2", *PLAIN[2:]]),
    (MOE, "p4de", 16, 16, 256, ["bucket=1,0", "prefetch=1", "cp=1,2", "recompute=none,2", "tp=1,2", "v=1,2"]),
    (TIED_BIAS, "p4d", 4, 4, 512, []),
]
SMALL = ("bucket=1,0", "prefetch=1,2", "cp=1,2", "recompute=none,selective,2", "v=1,2")
"""Narrows a space of 8 GPUs to some 50,000 configurations in which every axis has at least two values."""


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len", "fix"), CASES)
def test_the_size_is_the_number_listed(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int, fix: Sequence[str]
) -> None:
    it = case(architecture, cluster, gpus, batch, seq_len, fix)
    listed = list(leaves(it.space))
    assert len(set(listed)) == len(listed)
    assert BestFirst(it.space, it.problem.bounds, inf).size == len(listed)


@pytest.mark.parametrize(("architecture", "gpus"), [(DENSE, 16), (MOE, 16), (MOE, 64), (SHARED, 32)])
def test_no_two_degrees_put_ranks_alike(architecture: Architecture, gpus: int) -> None:
    space = Space(architecture, gpus, 8, 64, 256, {})
    configs = [
        Configuration(*found[:4], "1f1b", 1, 0, 1, 1, "none", False, "", *found[4:]) for found in space.degrees()
    ]
    meshes = [tuple((name, size) for name, size in mesh_of(config).axes if size > 1) for config in configs]
    assert len(configs) > 10
    assert len(set(meshes)) == len(meshes)


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len", "fix"), CASES)
def test_every_configuration_is_whole(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int, fix: Sequence[str]
) -> None:
    it = case(architecture, cluster, gpus, batch, seq_len, fix)
    for config in leaves(it.space):
        assert config.pp * config.tp * config.dp * config.cp == gpus
        assert config.dp % config.ep == 0
        assert config.micro_batch * config.num_microbatches * config.dp == batch
    for config in sample(it, 500, seed=2):
        layers, seconds = it.problem.costs.of(config)
        assert sum(layers) == architecture.layers
        assert len(layers) == len(seconds) == config.stages
        assert min(layers) >= 1


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len", "fix"), CASES)
def test_every_configuration_applies_and_verifies(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int, fix: Sequence[str]
) -> None:
    it = case(architecture, cluster, gpus, batch, seq_len, fix)
    for config in sample(it, 40, seed=1):
        compiled = it.problem.compile(config)  # raises where it does not apply or would not run
        chunks = compiled.dag.chunks
        assert {chunk.layer for chunk in chunks} == set(range(-1, architecture.layers + 1)), str(config)
        assert len(compiled.plan.rows) == config.pp
        assert compiled.plan.microbatches == config.num_microbatches
        assert sorted(rank for row in compiled.plan.rows for rank in row) == list(range(gpus))


def test_overlapped_recompute_under_zero_3() -> None:
    it = case(DENSE, "p4d", 8, 32, 512)
    it.problem.compile(Configuration(2, 1, 8, 1, "dualpipev", 2, 3, 1, 4, "full", False, "balanced"))


def test_experts_of_a_stage_on_two_rows_are_reduced_with_their_like() -> None:
    it = case(SHARED, "p4de", 8, 48, 512)
    dag = it.problem.compile(Configuration(2, 1, 4, 2, "dualpipe", 1, 1, 2, 6, "none", False, "even")).dag
    assert {bucket.ranks for bucket in dag.buckets if bucket.expert} == {4}


def test_a_tied_model_lies_on_one_row_a_stage() -> None:
    it = case(TIED, "p4d", 8, 16, 256, PLAIN)
    assert "dualpipe" not in {config.schedule for config in leaves(it.space)}
    assert "dualpipe" in {config.schedule for config in leaves(case(DENSE, "p4d", 8, 16, 256, PLAIN).space)}


def test_axes_are_what_is_listed() -> None:
    it = case(MOE, "p4de", 8, 16, 256, SMALL)
    listed = list(leaves(it.space))
    for name, values in it.space.axes().items():
        found = {getattr(config, name) for config in listed}
        if name == "sequence_parallel":
            found = {"on" if value else "off" for value in found}
        assert set(map(str, values)) == set(map(str, found)), name


_SHORT_OF = {"virtual_stages": "v"}


@pytest.mark.parametrize("axis", FIXABLE)
def test_fix_narrows_an_axis_and_nothing_else(axis: str) -> None:
    others = [each for each in ("pp=1,2,4", *SMALL) if each.partition("=")[0] not in (axis, _SHORT_OF.get(axis))]
    free = list(leaves(case(MOE, "p4de", 8, 4, 256, others).space))
    words = {True: "on", False: "off"}
    counts: dict[str, int] = {}
    for config in free:
        value = getattr(config, axis)
        counts.setdefault(words[value] if axis == "sequence_parallel" else str(value), 0)
        counts[words[value] if axis == "sequence_parallel" else str(value)] += 1
    for value, count in counts.items():
        fixed = list(leaves(case(MOE, "p4de", 8, 4, 256, [*others, f"{axis}={value}"]).space))
        assert len(fixed) == count
        assert set(fixed) <= set(free)
    both = list(leaves(case(MOE, "p4de", 8, 4, 256, [*others, f"{axis}={','.join(counts)}"]).space))
    assert both == free


@pytest.mark.parametrize(
    ("texts", "fixed"),
    [
        ([], {}),
        (["pp=4"], {"pp": ("4",)}),
        (["pp=4,8", "schedule=1f1b, zbv"], {"pp": ("4", "8"), "schedule": ("1f1b", "zbv")}),
        (["b=2", "m=8", "v=2", "sp=on"], {"micro_batch": ("2",), "num_microbatches": ("8",), "virtual_stages": ("2",),
                                          "sequence_parallel": ("on",)}),
        (["micro-batch=2"], {"micro_batch": ("2",)}),
        ([" pp =04"], {"pp": ("4",)}),
    ],
)  # fmt: skip
def test_parse_fix(texts: list[str], fixed: dict[str, tuple[str, ...]]) -> None:
    assert parse_fix(texts) == fixed


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["pp"], "not of the form axis=value"),
        (["pp="], "not of the form axis=value"),
        (["=4"], "no axis ''"),
        (["schedul=1f1b"], "did you mean schedule"),
        (["zzz=4"], "axes are pp, tp"),
        (["pp=4", "pp=8"], "pp twice"),
        (["b=1", "micro_batch=1"], "micro_batch twice"),
        (["pp=4,"], "not of the form axis=value"),
        (["pp=four"], "pp takes"),
        (["schedule=1f1"], "schedule takes"),
        (["zero=4"], "zero takes"),
        (["sp=yes"], "sequence_parallel takes on, off"),
        (["recompute=some"], "recompute takes none, selective, full or a number of layers"),
        (["outer=tp"], "outer takes pp, dp"),
        (["bucket=3"], "bucket takes 1, 2, 4, 0"),
        (["cuts=best"], "cuts takes balanced, even"),
        (["pp=0"], "pp takes"),
        (["tp=-2"], "tp takes"),
    ],
)
def test_parse_fix_refuses(texts: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_fix(texts)


@pytest.mark.parametrize(
    ("fix", "reason"),
    [
        (["pp=3"], "8 GPUs with global batch 16; pp could be 1, 2, 4, 8$"),
        (["pp=4", "tp=4"], "with the others as they are, pp could be 1, 2; tp could be 1, 2$"),
        (["pp=4", "dp=4"], "with the others as they are, pp could be 1, 2; dp could be 1, 2$"),
        (["ep=2"], "; ep could be 1$"),
        (["pp=1", "schedule=zbv"], "are, pp could be 2, 4; schedule could be 1f1b$"),
        (["pp=1", "schedule=dualpipe"], "are, pp could be 2, 4, 8; schedule could be 1f1b$"),
        (["schedule=zbv", "v=3"], "are, schedule could be interleaved_1f1b; virtual_stages could be 2$"),
        (["pp=2", "schedule=zbv", "v=3"], "could be interleaved_1f1b; virtual_stages could be 2$"),
        (["dp=1", "zero=3", "cp=1"], "are, dp could be 2, 4, 8; zero could be 0, 1; cp could be 2, 4, 8$"),
        (["tp=1", "sp=on"], "are, tp could be 2, 4; sequence_parallel could be off$"),
        (["schedule=dualpipe", "zero=3"], "schedule could be 1f1b, .*, zbv; zero could be 0, 1$"),
        (["b=3"], "; micro_batch could be 1, 2, 4, 8, 16$"),
        (["pp=3", "b=3"], "one of them is not enough; each alone, pp could be 1, 2, 4, 8; micro_batch could be 1, 2"),
    ],
)
def test_a_contradiction_is_named(fix: list[str], reason: str) -> None:
    it = case(DENSE, "p4d", 8, 16, 256, fix)
    assert not list(leaves(it.space))
    error = why_empty(it.space)
    assert isinstance(error, InfeasibleError)
    with pytest.raises(InfeasibleError, match=reason):
        raise error
    for text in fix:
        assert text.partition("=")[2] in str(error)
    for axis, _, values in re.findall(r"(\w+) (could be) ([^;]+)", str(error)):  # what is offered is there
        others = {} if "is not enough" in str(error) else {k: v for k, v in it.space.fix.items() if k != axis}
        for value in values.split(", "):
            assert next(leaves(replace(it.space, fix=others | {axis: (value,)})), None), (axis, value)


@pytest.mark.parametrize(
    ("fix", "forbid", "reason"),
    [
        (
            ["pp=2"], ["pp=2"],
            "--fix pp=2 --forbid pp=2 leaves no configuration on 8 GPUs with global batch 16; with the others as they "
            "are, pp could be 1, 4, 8; without --forbid pp, pp could be 2",
        ),
        (
            ["tp=1", "pp=2"], ["zero=1", "pp=2"],
            "--fix pp=2 --forbid pp=2 leaves no configuration on 8 GPUs with global batch 16; with the others as they "
            "are, pp could be 1, 4, 8; without --forbid pp, pp could be 2",
        ),
        (
            [], ["pp=1,2,4,8"],
            "--forbid pp=1,2,4,8 leaves no configuration on 8 GPUs with global batch 16; without --forbid pp, pp could "
            "be 1, 2, 4, 8",
        ),
        (
            [], ["zero=0,1,2,3"],
            "--forbid zero=0,1,2,3 leaves no configuration on 8 GPUs with global batch 16; without --forbid zero, zero "
            "could be 0, 1, 2, 3",
        ),
        (
            ["dp=1", "cp=1"], ["zero=0", "schedule=dualpipe"],
            "--fix dp=1 cp=1 --forbid zero=0 schedule=dualpipe leaves no configuration on 8 GPUs with global batch 16; "
            "with the others as they are, dp could be 2, 4, 8; cp could be 2, 4, 8; without --forbid zero, zero could "
            "be 0; without --forbid schedule, schedule could be dualpipe",
        ),
        (
            ["b=3"], ["zero=0,1,2,3"],
            "--fix micro_batch=3 --forbid zero=0,1,2,3 leaves no configuration on 8 GPUs with global batch 16, and "
            "changing one of them is not enough; each alone, micro_batch could be 1, 2, 4, 8, 16; without --forbid "
            "zero, zero could be 0, 1, 2, 3",
        ),
        (
            ["dp=1", "cp=1", "bucket=2"], ["schedule=dualpipe"],
            "--fix dp=1 cp=1 bucket=2 --forbid schedule=dualpipe leaves no configuration on 8 GPUs",
        ),
    ],
)  # fmt: skip
def test_what_is_forbidden_is_named(fix: list[str], forbid: list[str], reason: str) -> None:
    it = case(DENSE, "p4d", 8, 16, 256, fix)
    space = replace(it.space, forbid=parse_fix(forbid, "--forbid"))
    assert not list(leaves(space))
    error = str(why_empty(space))
    assert error.startswith(reason)
    if "is not enough" not in error:  # what is offered is there
        for without, axis, values in re.findall(r"(without --forbid \w+, )?(\w+) could be ([^;]+)", error):
            kept = {name: some for name, some in space.forbid.items() if not (without and name == axis)}
            for value in values.split(", "):
                fixed = space.fix if without and axis in space.fix else space.fix | {axis: (value,)}
                assert next(leaves(replace(space, fix=fixed, forbid=kept)), None), (axis, value)


def test_gpus_that_nothing_makes() -> None:
    """What would do does, and nothing between that and what was asked for."""
    for gpus, batch in ((23, 16), (13, 64), (1000003, 2048)):
        space = case(DENSE, "p4d", gpus, batch, 256).space
        text = str(why_empty(space))
        assert f"no pp x tp x cp x dp makes {gpus} GPUs" in text
        below, above = map(int, re.findall(r"; (\d+) or (\d+) GPUs would do", text)[0])
        assert below < gpus < above
        for near in {below, above, *range(max(below, gpus - 40), min(above, gpus + 40))}:
            assert all(replace(space, gpus=near).axes().values()) == (near in (below, above))


def test_more_gpus_than_a_strategy_may_have() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 1048577 is more than .*: at most 1048576"):
        Space(DENSE, 2**20 + 1, 8, 16, 256, {}).check()


def test_numbers_that_no_configuration_meets() -> None:
    for gpus, batch, seq_len in ((0, 1, 1), (-1, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match="must be at least 1"):
            Space(DENSE, gpus, 8, batch, seq_len, {}).check()


def test_divisors() -> None:
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_every_family_is_reached() -> None:
    assert {config.schedule for config in leaves(case(DENSE, "p4d", 8, 16, 256, PLAIN).space)} == set(FAMILIES)
