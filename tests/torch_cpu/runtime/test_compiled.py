"""Rows whose chunks Inductor compiled train as one process does."""

from __future__ import annotations

import pytest
import torch

from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.names import Sync
from piper_core.runtime.compiled import CompiledMacros
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.optimizer import SGD
from piper_core.runtime.program import Training
from tests.torch_cpu.runtime import cases
from tests.torch_cpu.runtime.cases import MIXTURE, TIED, Case, check, compiled, source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own imports
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, m=3),
        Case(schedule="1f1b", pp=2, m=2, apart=True),
        Case(pp=2, recompute="full"),
        Case(TIED, pp=2, sync=Sync.NONE),
        Case(dp=2, zero=2),
    ],
    ids=str,
)
def test_compiled_rows_train_as_one_process(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relies on compile_fx_inner and select_decomp_table."""
    program = compiled(case)
    where = source(case.architecture, case.micro_batch, degrees_of(program.dag), torch.float64)
    made = Lowering(program, where, compiler="inductor")
    monkeypatch.setattr(cases, "lowering", lambda *_: made)
    check(case, Training(SGD(0.1)))
    assert isinstance(made.macros, CompiledMacros)
    assert made.macros._calls


def test_experts_that_ranks_divide_are_refused() -> None:
    program = compiled(Case(MIXTURE, dp=2, ep=2))
    made = source(MIXTURE, 1, Degrees(expert=2), torch.float64)
    with pytest.raises(ConfigError, match="compiler 'none'"):
        Lowering(program, made, compiler="inductor")
