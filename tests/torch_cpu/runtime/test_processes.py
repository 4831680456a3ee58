"""Programs on real gloo processes train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_core.frontend.apart import apart
from piper_core.runtime.optimizer import SGD, AdamW, Clip
from piper_core.runtime.program import Training
from tests.torch_cpu.runtime.cases import LLAMA, MIXTURE, TIED, Case, compare, in_one_process, joined
from tests.torch_cpu.runtime.processes import train_in_forks

STEPS = 2
PLAIN = Training(SGD(0.1, 0.9), Clip(0.5))
CASES = [
    (Case(LLAMA, "1f1b", pp=4, m=6), PLAIN),
    (Case(LLAMA, "zbv", pp=2, v=2, m=4, dp=2, zero=3), PLAIN),
    (Case(LLAMA, "dualpipe", pp=2, m=4, dp=2, zero=1, recompute="full"), PLAIN),
    (Case(TIED, "1f1b", pp=2, m=2, tp=2, sequence=True), PLAIN),
    (Case(TIED, "1f1b", pp=2, m=4, dp=2, zero=2), Training(AdamW(0.01))),
    (Case(LLAMA, "1f1b", pp=2, m=2, cp=2, zero=1), PLAIN),
    (Case(MIXTURE, "dualpipev", pp=2, v=2, m=4, dp=2, ep=2, zero=1), PLAIN),
]


@pytest.mark.slow
def test_real_processes_train_as_one(tmp_path: Path) -> None:
    found = apart(train_in_forks, 4, str(tmp_path / "store"), CASES, STEPS)
    for i, (case, training) in enumerate(CASES):
        parts = [each[i] for each in found if each[i] is not None]
        assert len(parts) == case.ranks
        compare(case, joined(parts, STEPS), in_one_process(case, training))
