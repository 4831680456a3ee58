"""Every distinct chunk once, in every phase, however the model is divided; what does not fit is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piper_core.arch.presets import preset
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, Recompute, Region
from profiler.measure.chunks import Shape, by_layers, drop, legal, measure, shapes, subjects
from profiler.measure.layers import Layers, one_of_each
from profiler.measure.repeat import Effort
from profiler.record import OUT_OF_MEMORY
from tests.torch_cpu.profiler.fake import FakeClock

LLAMA = replace(preset("tiny-llama"), layers=2)
MOE = replace(preset("tiny-moe"), layers=3, dense_layers=1, ffn=64)
SEQ = 32
ONCE = Effort(least=1, most=1, warm_up=0)


@pytest.mark.parametrize(
    ("architecture", "degrees"),
    [
        (LLAMA, Degrees(2, sequence=True)),
        (LLAMA, Degrees(context=2)),
        (MOE, Degrees(2, sequence=True, expert=2)),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_every_chunk_runs_in_every_phase(architecture: Architecture, degrees: Degrees) -> None:
    made = subjects(architecture, [Shape(degrees, 1, SEQ)], torch.float32, "cpu")
    clock = FakeClock()
    found = {site: measure(each, clock, ONCE) for each in made for site in each.sites}
    regions = {site.region for site in found}
    middle = regions - {Region.EMBED, Region.HEAD}
    for region in middle:
        phases = {(site.phase, site.policy) for site in found if site.region is region}
        assert {phase for phase, _ in phases} == {Phase.F, Phase.B, Phase.BI, Phase.BW, Phase.R}
        assert (Phase.R, Recompute.FULL) in phases
    assert (Region.EMBED, Phase.BI) not in {(site.region, site.phase) for site in found}
    assert Phase.R not in {site.phase for site in found if site.region in (Region.EMBED, Region.HEAD)}
    assert all(each.sample is not None and not each.failed and each.peak_bytes > 0 for each in found.values())
    for site, each in found.items():
        if site.region is not Region.EMBED:
            assert (each.saved_bytes > 0) == (site.phase is Phase.F), site


def test_graphs_that_are_equal_are_measured_once() -> None:
    """Expert parallelism changes the experts' chunks alone."""
    made = subjects(MOE, shapes(MOE, SEQ, expert=(1, 2)), torch.float32, "cpu")
    divided = {each.layers.degrees.expert: {site.region for s in made if s.layers is each.layers for site in s.sites}
               for each in made}  # fmt: skip
    assert divided[2] == {Region.EXPERT}
    assert divided[1] > {Region.EXPERT, Region.ROUTER, Region.ATTENTION}
    assert len({each.digest for each in made}) == len(made)


def test_regions_of_all_layers_are_one_site() -> None:
    made = subjects(LLAMA, shapes(LLAMA, SEQ), torch.float32, "cpu")
    four = subjects(replace(LLAMA, layers=4), shapes(LLAMA, SEQ), torch.float32, "cpu")
    assert [each.digest for each in made] == [each.digest for each in four]
    part = one_of_each(MOE)
    assert (part.first, part.last) == (0, 2), "a dense layer and a mixture"


def test_values_are_those_of_a_step_and_go_when_dropped() -> None:
    (group,) = by_layers(subjects(LLAMA, shapes(LLAMA, SEQ), torch.float32, "cpu"))
    layers = group[0].layers
    with layers.inside():
        assert all(torch.isfinite(v).all() for v in layers.values.values() if v.is_floating_point())
    drop(group)
    assert "values" not in layers.__dict__


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_is_recorded(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    (first, *_) = subjects(LLAMA, shapes(LLAMA, SEQ), torch.float32, "cpu")
    monkeypatch.setattr(Layers, "call", fail)
    found = measure(first, FakeClock(), ONCE)
    assert found.sample is None
    assert found.failed == OUT_OF_MEMORY


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    (first, *_) = subjects(LLAMA, shapes(LLAMA, SEQ), torch.float32, "cpu")
    monkeypatch.setattr(Layers, "call", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        measure(first, FakeClock(), ONCE)


def test_degrees_that_the_model_does_not_allow() -> None:
    with pytest.raises(ConfigError, match="3"):
        shapes(LLAMA, SEQ, tensor=(3,))
    assert legal(LLAMA, SEQ, 4) == {"tensor": [1, 2, 4], "expert": [1]}
    assert legal(MOE, SEQ, 2) == {"tensor": [1, 2], "expert": [1, 2]}


@pytest.mark.parametrize("policy", [Recompute.FULL, Recompute.SELECTIVE])
def test_a_layer_is_computed_again_but_for_what_it_hands_on(policy: Recompute) -> None:
    """The next layer's input was kept, so that the runtime leaves the last product out, and the profile does."""
    graphs = {(s.region, s.phase, s.policy): g for s, _, g in Layers(LLAMA, 1, SEQ).units()}

    def products(region: Region, phase: Phase, policy: Recompute) -> int:
        return sum(call.target is torch.ops.aten.mm.default for call in graphs[region, phase, policy].calls)

    assert products(Region.MLP, Phase.F, Recompute.NONE) == 3
    assert products(Region.MLP, Phase.R, policy) == (2 if policy is Recompute.FULL else 0)
    again = products(Region.ATTENTION, Phase.R, policy)
    assert again == (products(Region.ATTENTION, Phase.F, Recompute.NONE) if policy is Recompute.FULL else 0)


@pytest.mark.parametrize("phase", [Phase.F, Phase.B, Phase.BW])
def test_a_chunk_takes_turns_on_as_many_values_as_a_step_has_layers(phase: Phase) -> None:
    layers = Layers(replace(LLAMA, layers=3), 1, SEQ)
    unit = next(u for site, u, _ in layers.units() if (site.region, site.phase) == (Region.MLP, phase))
    with torch.no_grad(), layers.inside():
        plain, turns = layers.call(unit), layers.turns(unit)
        assert len(turns.given) == 3
        same = [len({id(each) for each in column}) == 1 for column in zip(*turns.given, strict=True)]
        assert True in same or phase is Phase.BW, "what the chunk before has made stays"
        assert False in same
        for given in turns.given:
            for mine, theirs in zip(given, plain.given, strict=True):
                torch.testing.assert_close(mine, theirs)
        for _ in range(7):
            turns()
        assert len(turns._held) == (3 if phase is Phase.F else 0)
