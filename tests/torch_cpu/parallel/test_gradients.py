"""On real gloo processes divided models give the loss and the gradients of one process (float64)."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_core.frontend.apart import apart
from piper_core.frontend.degrees import Degrees
from tests.torch_cpu.parallel.divided import Case, Errors, compare
from tests.torch_cpu.parallel.models import BIASED, GPT, LATENT, LLAMA, MIXTURE, QWEN, SHORT_LATENT

TOLERANCE = 1e-9
TENSOR = [
    Case(model, Degrees(tensor=2, sequence=sequence))
    for model in (GPT, QWEN, LATENT, SHORT_LATENT, BIASED)
    for sequence in (False, True)
]
TENSOR += [Case(LLAMA, Degrees(tensor=4, sequence=sequence)) for sequence in (False, True)]
EXPERT = [
    Case(MIXTURE, Degrees(expert=2), "learned"),
    Case(MIXTURE, Degrees(expert=2), "tied"),
    Case(LATENT, Degrees(expert=2), "one"),
    Case(BIASED, Degrees(expert=2), "learned"),
    Case(MIXTURE, Degrees(expert=4), "tied"),
    Case(LATENT, Degrees(expert=4), "one"),
]
CONTEXT = [
    Case(GPT, Degrees(context=2)),
    Case(MIXTURE, Degrees(context=2), "learned"),
    Case(LLAMA, Degrees(context=2, method="all_to_all")),
]
TOGETHER = [
    Case(MIXTURE, Degrees(tensor=2, expert=2), "learned"),
    Case(MIXTURE, Degrees(tensor=2, sequence=True, expert=2), "tied"),
    Case(BIASED, Degrees(tensor=2, sequence=True, expert=2), "learned"),
    Case(LATENT, Degrees(tensor=2, expert=2), "one"),
    Case(LLAMA, Degrees(tensor=2, context=2)),
    Case(GPT, Degrees(tensor=2, sequence=True, context=2)),
    Case(LATENT, Degrees(tensor=2, sequence=True, context=2), "learned"),
    Case(LLAMA, Degrees(tensor=2, context=2, method="all_to_all")),
    Case(MIXTURE, Degrees(expert=2, context=2), "learned"),
    Case(LATENT, Degrees(expert=2, context=2, method="all_to_all"), "one"),
]
CASES = (*TENSOR, *EXPERT, *CONTEXT, *TOGETHER)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Errors]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return apart(compare, CASES, str(folder), timeout_s=300)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(found: dict[Case, list[Errors]], case: Case) -> None:
    """Eagerly; as graphs with B whole, with BI and BW apart, with recompute."""
    assert len(found[case]) == case.ranks
    for errors in found[case]:
        assert len(errors.modes) == 1 + len(case.modes)
        for mode, (loss, gradients) in errors.modes.items():
            assert loss < TOLERANCE, mode
            assert gradients < TOLERANCE, mode
        assert errors.bias == 0


def test_routing_was_as_uneven_as_it_can_be(found: dict[Case, list[Errors]]) -> None:
    for case, ranks in found.items():
        counts = [errors.counts for errors in ranks]
        match case.routing:
            case "tied":
                assert all(each[0] > 0 for each in counts)
                assert not any(any(each[2:]) for each in counts)  # experts, and whole ranks, without a token
            case "learned":
                assert all(len(set(each)) > 1 for each in counts)
            case "one":
                assert all(each[-1] == max(each) for each in counts)
            case _:
                pass
