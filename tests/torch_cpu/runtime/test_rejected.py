"""What does not fit together is refused in one line that says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piper_core.arch.closed_form import model_chunks
from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.ir.dag import training_dag
from piper_core.names import Region, Sync
from piper_core.program.program import Program
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.local import LocalWorld
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.optimizer import SGD, Clip
from piper_core.runtime.program import RankProgram, Training
from piper_core.runtime.slices import Reduction, Slicing, cut_batch
from piper_core.schedule.compile import compile_program
from tests.torch_cpu.runtime.cases import LLAMA, SEQ, TIED, Case, compiled, lowering, source


def test_a_program_of_another_model() -> None:
    made = source(LLAMA, 1, Degrees(), torch.float64)
    other = compiled(Case(replace(LLAMA, layers=3)))
    with pytest.raises(ConfigError, match="compiled for a model of 8 chunks, embed to head; this model has 10"):
        Lowering(other, made).table(0)
    wider = compiled(Case(replace(LLAMA, qk_norm=True)))
    shared = Lowering(wider, made)
    with pytest.raises(ConfigError, match=r"parameter 'layers.0.attention.q_norm.weight', which this one has not"):
        LocalWorld(1).run(lambda mine: RankProgram(shared, 0, mine))
    shared = Lowering(compiled(Case()), source(replace(LLAMA, qk_norm=True), 1, Degrees(), torch.float64))
    with pytest.raises(ConfigError, match=r"'layers.0.attention.k_norm.weight' that the strategy was not compiled for"):
        LocalWorld(1).run(lambda mine: RankProgram(shared, 0, mine))


def test_a_program_that_divides_otherwise() -> None:
    made = source(LLAMA, 1, Degrees(), torch.float64)
    with pytest.raises(ConfigError, match=r"divides the model by Degrees\(tensor=2"):
        Lowering(compiled(Case(tp=2)), made)


def test_chunks_that_are_divided_differently() -> None:
    data = [
        {"op": "place", "filter": {}, "devices": [0, 1]},
        {"op": "shard", "filter": {"REGION": "attention"}, "devices": [0, 1], "kind": "tensor"},
    ]
    program = compile_program(Program.parse(data), training_dag(model_chunks(LLAMA, SEQ), global_batch=1))
    with pytest.raises(ConfigError, match="differently by tensor; the runtime divides all alike"):
        degrees_of(program.dag)


def test_clipping_without_a_barrier() -> None:
    shared = lowering(Case(m=2, dp=2, sync=Sync.NONE), torch.float64)
    with pytest.raises(ConfigError, match="clipping needs sync: global_norm, found none"):
        LocalWorld(2).run(lambda mine: RankProgram(shared, mine.rank, mine, Training(SGD(), Clip(1.0))))
    with pytest.raises(ConfigError, match="max_norm must be above 0"):
        Clip(0.0)


def test_a_rank_that_the_program_has_not() -> None:
    with pytest.raises(ConfigError, match="the program has no rank 3; its ranks are"):
        lowering(Case(m=2, dp=2, sync=Sync.NONE), torch.float64).row_of(3)


def test_batches_of_another_size_and_slices_without_targets() -> None:
    slicing = Slicing(replicas=2, microbatches=2, sequences=1)
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="the batch has 3 sequences; the strategy takes 4: 2 replicas x 2 microb"):
        cut_batch((tokens, tokens), slicing, 0, [0], Reduction.TOKEN)
    targets = torch.zeros(4, 8, dtype=torch.int64)
    targets[2] = -100
    with pytest.raises(ConfigError, match="no target of microbatch 1 of replica 0 counts"):
        cut_batch((targets, targets), slicing, 0, [0, 1], Reduction.TOKEN)


def test_slices_cover_the_batch_and_weigh_one() -> None:
    slicing = Slicing(replicas=2, microbatches=3, sequences=2)
    batch = torch.arange(12 * 8).view(12, 8)
    targets = batch.masked_fill(batch % 5 == 0, -100)
    for reduction in Reduction:
        for ranks in (1, 2):
            degrees = Degrees(context=ranks)
            found = [
                part
                for replica in range(2)
                for place in range(ranks)
                for part in cut_batch((batch, targets), slicing, replica, range(3), reduction, degrees, place).values()
            ]
            assert sorted(torch.cat([each.inputs[0].flatten() for each in found]).tolist()) == list(range(96))
            assert sum(each.weight for each in found) == pytest.approx(1)
            assert sum(each.auxiliary for each in found) == pytest.approx(ranks)
    with pytest.raises(ConfigError):
        cut_batch((batch[:, :1], targets[:, :1].fill_(-100)), slicing, 0, [0], Reduction.MICROBATCH)


def test_stages_of_parts_of_layers() -> None:
    half = [chunk for chunk in model_chunks(LLAMA, SEQ).chunks if chunk.region is not Region.MLP]
    with pytest.raises(ConfigError, match="a stage is a run of whole layers"):
        ArchitectureSource(LLAMA, 1, SEQ).stage(half, {})


def test_a_tied_parameter_under_two_kinds_of_sharding() -> None:
    data = [
        {"op": "stage", "stages": 2},
        {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
        {"op": "place", "filter": {"PP": 1}, "devices": [2, 3]},
        {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 1], "shard_optimizer": True},
        {"op": "replicate", "filter": {"PP": 1}, "devices": [2, 3], "shard_grads": True},
    ]
    program = compile_program(Program.parse(data), training_dag(model_chunks(TIED, SEQ), global_batch=2))
    shared = Lowering(program, source(TIED, 1, Degrees(), torch.float64))
    with pytest.raises(ConfigError, match="embedding is under ZeRO-1 on one stage and ZeRO-2 on another"):
        LocalWorld(4).run(lambda mine: RankProgram(shared, mine.rank, mine))
