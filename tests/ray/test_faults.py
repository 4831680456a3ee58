"""Whatever ends a run: the call ends in time with rank, action and cause, nothing is left, and the next run works."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from piper_core.errors import RunError
from piper_core.runtime.faults import Fault, Kind
from piper_core.runtime.optimizer import SGD
from piper_core.runtime.trainer import Trainer
from tests.ray.strategies import MODEL, batch, pipeline, runs, traces

pytestmark = pytest.mark.usefixtures("cluster")
TIMEOUT_S = 6.0
CASES = [
    (Fault(Kind.KILL, 1, "1B0", 1), r"rank 1 at 1B0: its process died.*; rank 0 at 0RECV_B0 \(wait\)"),
    (Fault(Kind.RAISE, 0, "0F1", 1), "rank 0 at 0F1: ValueError: a fault made on purpose"),
    (Fault(Kind.STOP, 1, "1F1", 1), r"rank 1 at 1F1: stopped answering; it had 6 s; rank 0 at 0RECV_B1 \(wait\)"),
    (None, "OutOfMemoryError: its tensors take .* bytes, and 20,000 is the limit"),
]


@pytest.mark.parametrize(("fault", "said"), CASES, ids=["kill", "raise", "stop", "memory"])
def test_fault(fault: Fault | None, said: str, tmp_path: Path) -> None:
    before = traces()
    limit = 20_000 if fault is None else None
    trainer = Trainer(MODEL, pipeline(), SGD(), timeout_s=TIMEOUT_S, fault=fault, memory_limit_bytes=limit)
    pids = [home.pid for home in trainer._gang.homes.values()]
    if fault is not None:
        trainer.step(batch(trainer))
    began = time.monotonic()
    with pytest.raises(RunError, match=said) as caught:
        trainer.step(batch(trainer, 1))
    assert time.monotonic() - began < 4 * TIMEOUT_S  # its timeout, and moments to ask and to end; machines stall
    if fault is not None:
        assert (caught.value.rank, caught.value.action) == (fault.rank, fault.action)
    assert not any(map(runs, pids))
    assert traces() == before
