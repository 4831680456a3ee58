"""A strategy on real ranks trains as one process does, measures itself, and its checkpoint loads into another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piper_core.errors import ConfigError, PlanError
from piper_core.program.program import Program
from piper_core.runtime.compare import OneProcess, difference
from piper_core.runtime.optimizer import AdamW, Clip
from piper_core.runtime.ray_session import below
from piper_core.runtime.trainer import Trainer
from tests.ray.strategies import MODEL, batch, divided, pipeline, runs, sharded, traces

pytestmark = pytest.mark.usefixtures("cluster")


def test_trains_measures_saves_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """Three steps under ZeRO-1; saved after two; the third again from the file under tensor parallelism, in a pipeline
    and under ZeRO-3 (four sequences a step in each), with weights and optimizer states that are those of the first run.
    """
    optimizer, clip = AdamW(0.01), Clip(0.5)
    before = traces()
    with Trainer(MODEL, sharded(1), optimizer, clip=clip, dtype="float64") as first:
        check = OneProcess(first.source, first.slicing, first.training)
        for number in range(2):
            found = check.step(batch(first, number), first.step(batch(first, number)), first.whole("gradient"))
            assert found.equal, found
        first.save(tmp_path)
        with pytest.raises(ConfigError, match="the batch has 3 sequences; the strategy takes 4"):
            first.step((torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)))
        with pytest.raises(ConfigError, match="holds no whole checkpoint"):
            first.load(tmp_path / "nothing")
        pids = [home.pid for home in first._gang.homes.values()]
        loss = first.step(batch(first, 2), "time")
        assert first.last is not None
        timeline = first.last.timeline
        assert timeline is not None
        assert timeline.rows == 1
        assert {"0F0", "0B1", "0UPDATE"} <= {event.text for _, event in timeline.events()}
        wanted = first.whole()
        first.step(batch(first, 3), "memory")
        assert all(0 < each.kept_bytes < each.peak_bytes for each in first.last.ranks)
        assert all(each.peak_bytes == max(each.peak_by_action.values()) for each in first.last.ranks)
    assert not any(map(runs, pids))
    assert traces() == before
    for strategy in (divided(), pipeline(4)):
        with Trainer(MODEL, strategy, optimizer, clip=clip, dtype="float64", seed=9) as other:
            other.load(tmp_path)
            assert other.steps == 2
            assert abs(other.step(batch(other, 2)) - loss) < 1e-9
            found_after = other.whole()
            assert found_after.keys() == wanted.keys()
            assert max(difference(found_after[name], value) for name, value in wanted.items()) < 1e-8


def test_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that would not run, a loss for a model that has one, an unknown dtype."""
    monkeypatch.setattr("piper_core.runtime.trainer.Gang", lambda *_, **__: pytest.fail("started"))
    bad = pipeline()
    data = bad.program.to_data()
    data[-1]["actions"] = {"0": "0F0 0B0 0F1 0B1", "1": "1F1 1B1 1F0 1B0"}
    with pytest.raises(PlanError, match="deadlock"):
        Trainer(MODEL, type(bad)(bad.header, Program.parse(data)))
    with pytest.raises(ConfigError, match="built-in models return their loss"):
        Trainer(MODEL, pipeline(), loss=torch.nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="dtype must be float64, float32, bfloat16, found 'int8'"):
        Trainer(MODEL, pipeline(), dtype="int8")


@pytest.mark.slow
def test_compiled_chunks_train_as_one_process() -> None:
    with Trainer(MODEL, pipeline(), AdamW(0.01), dtype="float64", compiler="inductor") as trainer:
        check = OneProcess(trainer.source, trainer.slicing, trainer.training)
        for number in range(2):
            found = check.step(batch(trainer, number), trainer.step(batch(trainer, number)), trainer.whole("gradient"))
            assert found.equal, found
        pids = [home.pid for home in trainer._gang.homes.values()]
        assert not any("compile" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in below(pids))
