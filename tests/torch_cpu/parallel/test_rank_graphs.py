"""One rank's graphs: with any communicator, of any part of a model; parameters, and what else is said of a rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from piper_core.errors import ConfigError, PiperError
from piper_core.frontend.communicator import communicating
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_graphs, rank_module, routed_counts
from piper_core.frontend.run import Step
from piper_core.frontend.shares import part_of, shares
from piper_core.models import Part, build_model, build_stage
from piper_core.names import Region
from tests.torch_cpu.frontend.small import gradients
from tests.torch_cpu.models.tiny import TINY, tokens
from tests.torch_cpu.parallel.divided import AXES, Case, Errors, compiled, errors, graphs, located, places
from tests.torch_cpu.parallel.models import BIASED, LATENT, LLAMA, MIXTURE, relative
from tests.torch_cpu.parallel.virtual import Meeting, Virtual


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXTURE, Degrees(tensor=2, sequence=True, expert=2), "learned"),
        Case(LATENT, Degrees(expert=2, context=2), "one"),
    ],
    ids=str,
)
def test_ranks_may_be_threads(case: Case) -> None:
    """The communicator is all that graphs know of other ranks."""
    steps, sizes = compiled(case, graphs(case)), case.degrees.by_axis()
    meetings: dict[tuple[tuple[str, int], ...], Meeting] = {}
    ranks = []
    for rank in range(case.ranks):
        place = places(rank, case.degrees)
        mine = {}
        for axis in AXES:
            key = ((axis, -1), *((other, place[other]) for other in AXES if other != axis))
            mine[axis] = meetings.setdefault(key, Meeting(sizes[axis]))
        ranks.append(Virtual(place, mine))

    def run(rank: Virtual) -> Errors:
        with communicating(rank):
            return errors(case, steps, dict(rank.places), rank)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for found in pool.map(run, ranks):
            assert all(max(each) < 1e-9 for each in found.modes.values())


def test_a_collective_needs_a_communicator() -> None:
    step = Step(rank_graphs(LLAMA, Degrees(tensor=2), Part(0, 1), micro_batch=2, seq_len=16))
    module = rank_module(LLAMA, Degrees(tensor=2), {}, Part(0, 1))
    with pytest.raises(PiperError, match="inside communicating"):
        step(module, torch.zeros(2, 16, 64))


def test_rows_counted_at_run_time_are_not_compiled() -> None:
    made = rank_graphs(MIXTURE, Degrees(expert=2), Part(0, 1), micro_batch=2, seq_len=16)
    experts = [piece for piece in made.pieces if piece.site.region is Region.EXPERT]
    with pytest.raises(ConfigError, match="need compiler 'none'"):
        Step(replace(made, pieces=tuple(experts)), compiler="inductor")


@pytest.mark.parametrize("name", ["llama", "gpt", "deepseek"])
def test_stages_are_the_model_cut_in_parts(name: str) -> None:
    """Embedding alone, layers without ends, a layer and the head: gradients travel back as hidden states came."""
    architecture, x = TINY[name], tokens()
    loss, expected = gradients(build_model(architecture, dtype=torch.float64), x, x.roll(1))
    parts = [Part(0, 0, embed=True), Part(0, 2), Part(2, 3, head=True)]
    size = {"micro_batch": 2, "seq_len": 16, "dtype": torch.float64}
    steps = [Step(rank_graphs(architecture, Degrees(), part, **size)) for part in parts]  # type: ignore[arg-type]
    modules = [build_stage(architecture, part, dtype=torch.float64) for part in parts]
    inputs = [[x]]
    for step, module in zip(steps[:-1], modules[:-1], strict=True):
        outputs, _ = step(module, *inputs[-1])
        inputs.append([*outputs])
    inputs[-1].append(x.roll(1))
    found: dict[str, torch.Tensor] = {}
    upstream: list[torch.Tensor] = []
    for step, module, given in reversed(list(zip(steps, modules, inputs, strict=True))):
        outputs, made = step(module, *given, tangents=upstream)
        upstream = [made.pop("input 0")] if "input 0" in made else []
        for key, value in made.items():
            found[key] = found[key] + value if key in found else value
        if module is modules[-1]:
            torch.testing.assert_close(outputs[0], loss)
    if architecture.tied:  # each end has its part
        found["embed.tokens.weight"] = found["embed.tokens.weight"] + found.pop("head.projection.weight")
    assert found.keys() == expected.keys()
    assert max(relative(found[key], expected[key]) for key in found) < 1e-9


def test_places_in_the_model_are_those_of_the_whole() -> None:
    architecture = TINY["llama"]
    sites = []
    for part in (Part(0, 0, embed=True), Part(1, 2), Part(3, 3, head=True)):
        sites += [p.site for p in rank_graphs(architecture, Degrees(), part, micro_batch=2, seq_len=8).pieces]
    assert [(str(site), site.layer) for site in sites] == [
        ("embed", -1), ("L1.attention", 1), ("L1.mlp", 1), ("head", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("part", [Part(0, 0), Part(2, 1), Part(0, 4), Part(-1, 1)])
def test_parts_that_are_none_are_refused(part: Part) -> None:
    with pytest.raises(ConfigError, match="a stage is at least one"):
        build_stage(TINY["llama"], part)


def test_a_rank_has_its_part_of_the_whole_model_s_weights() -> None:
    degrees, place = Degrees(tensor=2, expert=2), {"tensor": 1, "expert": 1, "context": 0}
    whole = dict(build_model(BIASED, seed=7).named_parameters())
    module = rank_module(BIASED, degrees, place, seed=7)
    how, at = shares(module), located(degrees, place)
    assert how.keys() == whole.keys()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, part_of(whole[name], how[name], at)), name
    assert how["layers.1.moe.experts.up.weight"] == (("tensor", 1), ("expert", 0))
    assert how["layers.1.moe.experts.down.bias"] == (("expert", 0),)
    assert how["layers.1.moe.experts.shared.down.weight"] == (("tensor", 1),)
    assert how["layers.1.moe.router.scores.weight"] == ()


def test_where_routers_count() -> None:
    made = rank_graphs(TINY["deepseek"], Degrees(), micro_batch=2, seq_len=16)
    counts = routed_counts(made)
    assert sorted(counts) == [1, 2]
    for piece in made.pieces:
        if piece.site.region is Region.ROUTER:
            (node,) = (n for n in piece.forward.outputs if n.name == counts[piece.site.layer])
            assert tuple(node.meta["val"].shape) == (TINY["deepseek"].experts,)
