"""The gloo communicator's own collectives give every rank the same, whatever the size."""

from __future__ import annotations

import pytest

from piper_core.frontend.apart import apart
from tests.torch_cpu.runtime.reductions import in_forks


@pytest.mark.slow
def test_all_reduces_small_and_large() -> None:
    first, *others = apart(in_forks)
    assert all(same for *_, same in first), [each for each in first if not each[-1]]
    assert all(each == first for each in others)
