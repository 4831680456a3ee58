"""Compositions of all features on virtual ranks train as one process does: losses, norms, gradients, parameters.

The sample has every pair of features that can be combined; ``python -m tests.benchmarks compositions`` runs more.
"""

from __future__ import annotations

from itertools import combinations, groupby

import pytest
import torch

from piper_core.names import Sync
from piper_core.runtime.optimizer import SGD, Clip
from piper_core.runtime.program import Training
from piper_core.schedule.families import FAMILIES
from tests.torch_cpu.runtime.cases import BIASED, LLAMA, TIED, Case, check
from tests.torch_cpu.runtime.compositions import Composition, features, sample, source_of

SAMPLE = sorted(sample(seed=8, pool=2000, captures=10), key=lambda each: str(source_of(each.case)))
GROUPS = [list(group) for _, group in groupby(SAMPLE, key=lambda each: str(source_of(each.case)))]


def _named(group: list[Composition]) -> str:
    case = group[0].case
    return f"{case.architecture.name}-tp{case.tp}-ep{case.ep}-cp{case.cp}-{len(group)}"


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=_named)
def test_sample(group: list[Composition]) -> None:
    torch.set_num_threads(1)
    for each in group:
        check(each.case, each.training)


def test_sample_covers_what_there_is() -> None:
    assert len(SAMPLE) >= 25
    found = {pair for each in SAMPLE for pair in combinations(sorted(features(each)), 2)}
    single = {name for pair in found for name in pair}
    assert single >= {*FAMILIES, "ZeRO-1", "ZeRO-2", "ZeRO-3", "ep", "sequence", "context ring", "BI and BW apart"}
    assert {("ep", "zbv"), ("ZeRO-3", "context ring"), ("dualpipev", "recompute full"), ("ep", "sequence")} <= found


FLOAT32 = (
    Case(LLAMA, "zbv", pp=2, v=2, m=4, dp=2, zero=3),
    Case(TIED, "1f1b", pp=2, m=4, dp=2, zero=2, recompute="full"),
    Case(TIED, m=2, dp=2, zero=3, recompute="full"),
    Case(TIED, "zbv", pp=2, v=2, m=2, dp=2, zero=1, sync=Sync.NONE),
)


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32(case: Case) -> None:
    clip = Clip(0.5) if case.sync is Sync.GLOBAL_NORM else None
    check(case, Training(SGD(0.1, 0.9), clip), torch.float32, 1e-5)


def test_microbatches_of_several_sequences() -> None:
    check(Case(BIASED, "1f1b", pp=2, m=2, dp=2, ep=2, micro_batch=2), Training(SGD(0.1)))
