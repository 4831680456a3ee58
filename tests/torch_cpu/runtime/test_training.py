"""Narrow weights, bounded buffers, models of a person's own, many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_core.frontend.trace import trace_module
from piper_core.ir.dag import training_dag
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.runtime.local import LocalCommunicator, LocalWorld
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.model import ModuleSource
from piper_core.runtime.optimizer import SGD, AdamW, Clip
from piper_core.runtime.program import RankProgram, Training
from piper_core.runtime.reference import Reference
from piper_core.runtime.state import assemble, held
from piper_core.schedule.compile import compile_program
from tests.torch_cpu.runtime.cases import (
    LLAMA,
    Case,
    batches,
    compare,
    in_one_process,
    lowering,
    on_virtual_ranks,
)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_narrow_weights_have_wide_copies(zero: int) -> None:
    """Updates far below what bf16 can hold add up in the master weights, of which the parameters are roundings."""
    case = Case(LLAMA, "1f1b", pp=2, m=2, dp=2, zero=zero)
    seen: dict[str, bool] = {}

    def see(rank: RankProgram) -> None:
        for stage in rank.sync.stages.values():
            for run in stage.runs:
                target = run.flat if run.zero == 0 else run.part
                assert target is not None
                assert (run.dtype, run.master.dtype, run.gradient.dtype) == (torch.bfloat16, *(torch.float32,) * 2)
                assert torch.equal(run.master.bfloat16(), target)
                seen["finer"] = seen.get("finer", False) or not torch.equal(run.master, target.float())

    training = Training(SGD(1e-4))
    narrow = on_virtual_ranks(case, training, torch.bfloat16, 2, see)
    wide = on_virtual_ranks(case, training, torch.float32, 2)
    assert seen["finer"]
    assert narrow.losses == pytest.approx(wide.losses, rel=0.01)
    for name, gradient in wide.gradients[0].items():
        error = (narrow.gradients[0][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 0.1, (name, float(error))


def test_zero_3_holds_few_buckets_whole() -> None:
    """Whatever the depth: the buckets that a chunk uses (two here) and the one ahead; of gradients those that a chunk
    adds to, and two on their way."""
    case = Case(replace(LLAMA, layers=8), m=2, dp=2, zero=3)
    seen: list[float] = []

    def see(rank: RankProgram) -> None:
        sizes = [run.flat_nbytes for stage in rank.sync.stages.values() for run in stage.runs]
        made = sum(each.nbytes for each in rank.sync.arena.tensors)
        assert made <= 7 * max(sizes)
        seen.append(made / sum(sizes))

    on_virtual_ranks(case, Training(SGD(0.1)), torch.float32, 2, see)
    assert len(seen) == case.ranks
    assert max(seen) < 0.4


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("zbv", 2)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_zero_3_in_a_pipeline_gathers_what_a_chunk_reads_and_the_one_ahead(
    schedule: str, v: int, prefetch: int
) -> None:
    """At no time of a step more, however many microbatches and buckets; the largest chunk lies in three of them."""
    case = Case(replace(LLAMA, layers=8), schedule, pp=2, v=v, m=4, dp=2, zero=3, prefetch=prefetch)
    shared, (batch,) = lowering(case, torch.float32), batches(case, 1)

    def most(mine: LocalCommunicator) -> tuple[float, int]:
        program, found = RankProgram(shared, mine.rank, mine, Training(SGD(0.1))), [0]

        def around(calls: Sequence[Callable[[], object]]) -> None:
            for call in calls:
                call()
                held = (taken for queue in program.sync._gathered.values() for _, taken in queue)
                found.append(sum(flat.nbytes for taken in held for _, flat, _ in taken))

        program.run(program.slices(*batch), around)
        assert found[-1] == 0
        sizes = [sum(run.flat_nbytes for run in bucket.runs) for bucket in program.sync.buckets.values()]
        return max(found) / max(sizes), len(sizes)

    for ratio, buckets in LocalWorld(case.ranks).run(most):
        assert buckets > 10
        assert 1 < ratio <= 3 + prefetch


class Residual(nn.Module):
    """A person's model: blocks with a skip from the first to the last, of which two stages take each other's values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.last(x), y)


def test_a_model_of_a_persons_own() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    inputs = tuple(each[:2] for each in batch)
    data: list[dict[str, Any]] = [
        {"op": "stage", "stages": 2},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
        {"op": "place", "filter": {"PP": 1}, "devices": [2, 3]},
        {"op": "replicate", "filter": {}, "devices": [[0, 1], [2, 3]], "shard_optimizer": True},
        {"op": "order", "actions": {"0": "0F0 0F1 0BI0 0BW0 0B1", "1": "1F0 1B0 1F1 1B1"}},
    ]
    table = trace_module(model, inputs).model()
    shared = Lowering(
        compile_program(Program.parse(data), training_dag(table, global_batch=8)), ModuleSource(model, inputs)
    )
    training = Training(AdamW(0.01), Clip(0.1))
    reference = Reference(Residual().double(), shared.slicing, training)
    reference.model.load_state_dict(model.state_dict())

    def work(mine: LocalCommunicator) -> Any:
        rank = RankProgram(shared, mine.rank, mine, training)
        losses = [float(rank.step(*batch)) for _ in range(2)]
        return losses, list(held(rank))

    found = LocalWorld(4).run(work)
    expected = [reference.step(*batch) for _ in range(2)]
    for step, wanted in enumerate(expected):
        assert sum(losses[step] for losses, _ in found) == pytest.approx(wanted.loss, rel=1e-9)
    after = assemble(part for _, parts in found for part in parts)
    for name, value in expected[-1].parameters.items():
        torch.testing.assert_close(after[name], value, rtol=1e-8, atol=1e-10)


def test_rows_whose_order_was_made_by_the_list_scheduler() -> None:
    """Nothing depends on where an order comes from."""
    case = Case(LLAMA, "zb_h1", pp=2, m=3, dp=2, zero=1, sync=Sync.NONE)
    training = Training(SGD(0.1, 0.9))
    compare(case, on_virtual_ranks(case, training), in_one_process(case, training))


def test_a_step_again_from_the_same_state_repeats() -> None:
    """Same seeds, same bits, in every run on virtual ranks."""
    case, training = Case(LLAMA, "dualpipev", pp=2, v=2, m=4, dp=2, zero=2), Training(AdamW(0.01), Clip(0.5))
    one, two = (on_virtual_ranks(case, training, torch.float32) for _ in range(2))
    assert one.losses == two.losses
    assert all(torch.equal(two.parameters[1][name], value) for name, value in one.parameters[1].items())
    assert len(batches(case, 2)) == 2
    assert lowering(case, torch.float32).ranks == (0, 1, 2, 3)
