"""On real gloo processes divided models give the loss and the gradients of one process (float64)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.torch_cpu.parallel.checks import Cases, Errors, compare
from tests.torch_cpu.parallel.models import BIASED, GPT, LATENT, LLAMA, MIXTURE, QWEN, SHORT_LATENT
from tests.torch_cpu.parallel.ranks import on_ranks

TOLERANCE = 1e-9
CASES = {
    2: Cases(
        (GPT, QWEN, LATENT, SHORT_LATENT, BIASED),
        ((MIXTURE, "learned"), (MIXTURE, "tied"), (LATENT, "one"), (BIASED, "learned")),
        ((GPT, "ring"), (MIXTURE, "ring"), (LLAMA, "all_to_all")),
    ),
    4: Cases((LLAMA,), ((MIXTURE, "learned"), (MIXTURE, "tied"), (LATENT, "one"))),
}
SIZES = pytest.mark.parametrize("results", [2, 4], indirect=True)


@pytest.fixture(scope="module")
def ran() -> dict[int, list[Errors]]:
    return {}


@pytest.fixture
def results(request: pytest.FixtureRequest, ran: dict[int, list[Errors]], tmp_path_factory: Any) -> list[Errors]:
    """What each rank found, run once for each number of ranks."""
    size: int = request.param
    if size not in ran:
        ran[size] = on_ranks(compare, size, tmp_path_factory.mktemp("ranks"), CASES[size])
    return ran[size]


def check(found: Mapping[Any, Any], count: int) -> None:
    assert len(found) == count
    for case, (loss, gradients, *_) in found.items():
        assert loss < TOLERANCE, case
        assert gradients < TOLERANCE, case


@SIZES
def test_tensor_and_sequence_parallel_graphs(results: list[Errors]) -> None:
    for errors in results:
        check(errors.tensor, 4 * len(CASES[len(results)].tensor))


@SIZES
def test_expert_parallel(results: list[Errors]) -> None:
    for errors in results:
        found = errors.expert
        check(found, len(CASES[len(results)].expert))
        copies = found[MIXTURE.name, "tied"][2]
        assert copies[0] > 0
        assert not any(copies[2:])  # experts, and whole ranks, without a token
        assert len(set(found[MIXTURE.name, "learned"][2])) > 1  # uneven
        assert found[LATENT.name, "one"][2][-1] == max(found[LATENT.name, "one"][2])
        assert all(bias == 0 for *_, bias in found.values())


@pytest.mark.parametrize("results", [2], indirect=True)
def test_context_parallel(results: list[Errors]) -> None:
    for errors in results:
        check(errors.context, 2 * len(CASES[2].context))
