"""Balance biases of routers (arXiv 2408.15664): moved after each step by how many copies each expert was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from piper_core.ir.dag import Dag
from piper_core.ir.shard_state import Ranks, reduction_groups
from piper_core.names import Phase, Region
from piper_core.runtime.communicator import Communicator, Group
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.storage import StageStorage

LABEL = "balance"


class Balance:
    """Counts of copies by layer, added up over a rank's microbatches and then over the ranks that see other tokens."""

    def __init__(
        self, lowering: Lowering, stages: Mapping[int, StageStorage], groups: Mapping[tuple[Ranks, str], Group],
        rank: int, rate: float,
    ) -> None:  # fmt: skip
        self.rate, self.counts = rate, dict[int, Tensor]()
        joint = lowering.source.cut.joint
        placeholder = {name: p for p, name in joint.buffers.items()}
        self.biases: dict[int, Tensor] = {}
        self.groups: dict[int, list[Group]] = {}
        for layer, stage in layers_of(lowering).items():
            if stage in stages:
                self.biases[layer] = stages[stage].buffers[placeholder[f"layers.{layer}.moe.router.bias"]]
                found = token_groups(lowering.compiled.dag, stage, rank, lowering.degrees.sequence)
                self.groups[layer] = [groups[ranks, LABEL] for ranks in found if len(ranks) > 1]

    def add(self, layer: int, counts: Tensor) -> None:
        """Add the counts of one microbatch."""
        self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts.clone()

    def update(self, communicator: Communicator) -> None:
        """Move the biases towards experts that had fewer copies than the mean, and start counting anew."""
        for layer in sorted(self.counts):
            counts, bias = self.counts[layer], self.biases[layer]
            for group in self.groups[layer]:
                communicator.all_reduce(counts, group).wait()
            given = counts.to(bias.dtype)
            bias += self.rate * torch.sign(given.mean() - given)
        self.counts.clear()


def layers_of(lowering: Lowering) -> dict[int, int]:
    """Return the stage of each layer whose router has a balance bias."""
    dag = lowering.compiled.dag
    forwards = dag.compute & (dag.nodes.phase == Phase.F)
    stage_of = dict(zip(dag.nodes.chunk[forwards].tolist(), dag.nodes.stage[forwards].tolist(), strict=True))
    return {
        chunk.layer: max(0, stage_of[i])
        for i, chunk in enumerate(dag.chunks)
        if chunk.region is Region.ROUTER and chunk.layer in lowering.counts
    }


def token_groups(dag: Dag, stage: int, rank: int, sequence: bool) -> list[Ranks]:
    """Return the groups over which the tokens of a stage are divided, of which a rank is a member."""
    mine = dag.compute & (dag.nodes.stage == stage)
    rows = tuple(dag.groups[g] for g in sorted(set(dag.nodes.group[mine].tolist())))
    states = [dag.states[index] for index in sorted(set(dag.nodes.state[mine].tolist()))]  # of all rows of the stage
    context = tuple(dict.fromkeys(group for state in states for group in state.context))
    whole = replace(states[0], expert=(), context=context)
    found = [next(group for group in reduction_groups(whole, rows) if rank in group)]
    if sequence:
        found += dict.fromkeys(group for state in states for group in state.tensor if rank in group)
    return found
