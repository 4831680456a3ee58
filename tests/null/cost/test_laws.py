"""Laws of every cost model: more is never quicker, better hardware is never slower."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_core.arch import Chunk, model_chunks, preset
from piper_core.errors import ConfigError
from piper_core.names import Collective, Phase, Recompute, Region
from profiler.spec import Cluster, load_cluster
from search.cost import CostModel, RooflineCost

P4DE = load_cluster("p4de")
KINDS = tuple(kind for kind in Collective if kind is not Collective.NONE)
PHASES = (Phase.F, Phase.BI, Phase.BW, Phase.R)
TABLES = tuple(model_chunks(preset(name), 1024) for name in ("llama9b", "piper-9b"))
CHUNKS = tuple(chunk for table in TABLES for chunk in table.chunks if chunk.layer in (-1, 0, table.layers))
MODELS: tuple[CostModel, ...] = (RooflineCost(P4DE), RooflineCost(load_cluster("cpu")))
GROUPS = (
    tuple(range(2)),
    tuple(range(8)),
    tuple(range(16)),
    tuple(range(0, 32, 8)),
    tuple(range(0, 32, 4)),
    tuple(range(6, 12)),
)
models = st.sampled_from(MODELS)
chunks = st.sampled_from(CHUNKS)
sizes = st.floats(1.0, 1e10)
close = pytest.approx


def faster(cluster: Cluster, field: str, factor: float) -> Cluster:
    if hasattr(cluster.device, field):
        return replace(cluster, device=replace(cluster.device, **{field: factor * getattr(cluster.device, field)}))
    return replace(cluster, **{field: factor * getattr(cluster, field)})


@given(models, chunks, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_b_is_bi_and_bw(model: CostModel, chunk: Chunk, sequences: int, tensor: int, sequence: bool) -> None:
    parts = [model.compute_s(chunk, phase, sequences, tensor, sequence) for phase in (Phase.BI, Phase.BW)]
    assert model.compute_s(chunk, Phase.B, sequences, tensor, sequence) == sum(parts)


@given(models, chunks, st.sampled_from(PHASES), st.integers(1, 16), st.integers(0, 16))
def test_more_sequences_are_never_quicker(model: CostModel, chunk: Chunk, phase: Phase, few: int, more: int) -> None:
    assert model.compute_s(chunk, phase, few) <= model.compute_s(chunk, phase, few + more)


@given(models, chunks, st.sampled_from(PHASES), st.sampled_from([2, 4, 8]), st.booleans())
def test_tensor_parallelism_divides_at_most_by_its_degree(
    model: CostModel, chunk: Chunk, phase: Phase, tensor: int, sequence: bool
) -> None:
    whole = model.compute_s(chunk, phase, 4)
    part = model.compute_s(chunk, phase, 4, tensor, sequence)
    assert whole / tensor * (1 - 1e-9) <= part <= whole


def test_tensor_parallelism_divides_large_products() -> None:
    model, mlp = MODELS[0], CHUNKS[2]
    assert model.compute_s(mlp, Phase.F, 8, 4, True) == close(model.compute_s(mlp, Phase.F, 8) / 4, rel=0.1)


@given(models, chunks, st.sampled_from(PHASES), st.sampled_from([2, 4, 8]))
def test_context_parallelism_divides_the_sequence(model: CostModel, chunk: Chunk, phase: Phase, context: int) -> None:
    whole = model.compute_s(chunk, phase, 8)
    assert model.compute_s(chunk, phase, 8, context=context) <= whole


@pytest.mark.parametrize("phase", [Phase.F, Phase.BI, Phase.BW])
def test_fewer_and_fuller_experts_are_about_as_fast(phase: Phase) -> None:
    """Each rank has as many tokens as before, in products that are larger and fewer."""
    expert = next(chunk for chunk in CHUNKS if chunk.region is Region.EXPERT)
    times = [MODELS[0].compute_s(expert, phase, 4, expert=degree) for degree in (1, 2, 4, 8)]
    assert all(0.5 * times[0] < time < 1.02 * times[0] for time in times)


@given(models, chunks, st.integers(1, 8))
def test_recompute_repeats_forward_or_its_core(model: CostModel, chunk: Chunk, sequences: int) -> None:
    forward = model.compute_s(chunk, Phase.F, sequences)
    times = [model.compute_s(chunk, Phase.R, sequences, recompute=policy) for policy in Recompute]
    assert times[0] == 0
    assert times[0] <= times[1] <= times[2] <= forward
    assert (times[2] < forward) == (chunk.again is not None)


@pytest.mark.parametrize(
    "field",
    ["matmul_flops", "memory_bytes_per_s", "attention_efficiency", "link_bytes_per_s", "nic_bytes_per_s"],
)
@pytest.mark.parametrize("group", GROUPS)
def test_better_hardware_is_never_slower(field: str, group: tuple[int, ...]) -> None:
    slow, fast = RooflineCost(P4DE), RooflineCost(faster(P4DE, field, 1.5))
    for chunk in CHUNKS:
        for phase in PHASES:
            assert fast.compute_s(chunk, phase, 2, 2) <= slow.compute_s(chunk, phase, 2, 2)
    for size in (1e3, 1e6, 1e9):
        for kind in KINDS:
            assert fast.collective_s(kind, size, group) <= slow.collective_s(kind, size, group)
        assert fast.send_s(size, group[:1], group[-1:]) <= slow.send_s(size, group[:1], group[-1:])


@given(models, st.sampled_from(KINDS), sizes, sizes, st.sampled_from(GROUPS))
def test_more_bytes_are_never_quicker(
    model: CostModel, kind: Collective, one: float, other: float, group: tuple[int, ...]
) -> None:
    few, many = sorted((one, other))
    assert 0 < model.collective_s(kind, few, group) <= model.collective_s(kind, many, group)
    assert model.send_s(few, group[:1], group[-1:]) <= model.send_s(many, group[:1], group[-1:])


@given(models, st.sampled_from(Collective), sizes)
def test_a_group_of_one_costs_nothing(model: CostModel, kind: Collective, size: float) -> None:
    assert model.collective_s(kind, size, (3,)) == 0
    assert model.send_s(size, (3,), (3,)) == 0


@given(models, sizes, st.sampled_from(GROUPS))
def test_a_reduction_is_a_scatter_and_a_gather(model: CostModel, size: float, group: tuple[int, ...]) -> None:
    reduce, scatter, gather = (
        model.collective_s(kind, size, group)
        for kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    assert reduce <= scatter + gather
    if max(group) < 8 or size > 1e8:  # across nodes, a small reduction is a tree; scatters and gathers are rings
        assert max(scatter, gather) < reduce


def test_a_group_across_nodes_is_slower_than_inside_one() -> None:
    model = MODELS[0]
    for kind in KINDS:
        assert model.collective_s(kind, 1e8, tuple(range(8))) < model.collective_s(kind, 1e8, tuple(range(0, 64, 8)))
    assert model.send_s(1e8, (0,), (1,)) < model.send_s(1e8, (0,), (8,))


def test_flows_share_the_cards_of_their_node() -> None:
    model = MODELS[0]
    one, four, eight = (model.send_s(1e8, tuple(range(n)), tuple(range(8, 8 + n))) for n in (1, 4, 8))
    assert one == four  # four cards
    assert eight == close(2 * one, rel=0.01)


def test_an_update_grows_with_its_parameters() -> None:
    model = MODELS[0]
    assert model.update_s(0) == 0
    assert model.update_s(2e9) == 2 * model.update_s(1e9)


def test_degrees_under_one_are_refused() -> None:
    with pytest.raises(ConfigError):
        MODELS[0].compute_s(CHUNKS[0], Phase.F, 1, 0)


def test_an_answer_already_given_is_quick() -> None:
    """About 0.4 microseconds on an idle core; the limit leaves room for a busy one."""
    model, group = MODELS[0], tuple(range(32))
    calls: tuple[Callable[[], float], ...] = (
        lambda: model.compute_s(CHUNKS[1], Phase.F, 1, 2, True),
        lambda: model.collective_s(Collective.ALL_REDUCE, 1e6, group),
    )
    for call in calls:
        call()
        assert min(timeit.repeat(call, number=2000, repeat=5)) / 2000 < 10e-6
