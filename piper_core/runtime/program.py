"""One rank's program: its row's steps bound to its own tensors, as a flat list of callables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper_core.errors import ConfigError
from piper_core.frontend.capture import boxed
from piper_core.frontend.communicator import communicating
from piper_core.frontend.cut import reach
from piper_core.ir.shard_state import Ranks
from piper_core.names import Phase
from piper_core.names import Sync as Barrier
from piper_core.runtime.balance import LABEL, Balance, layers_of, token_groups
from piper_core.runtime.bind import Call, bind
from piper_core.runtime.communicator import Communicator, Group
from piper_core.runtime.groups import AXES, AxisGroups, axis_ranks
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.optimizer import AdamW, Clip, Optimizer
from piper_core.runtime.slices import Reduction, Slice, cut_batch
from piper_core.runtime.steps import Do
from piper_core.runtime.storage import stage_storage
from piper_core.runtime.sync import Sync
from piper_core.schedule.plan import Communicator as Line


@dataclass(frozen=True, slots=True)
class Training:
    """How parameters are updated, beside what the program says."""

    optimizer: Optimizer = field(default_factory=AdamW)
    clip: Clip | None = None
    reduction: Reduction = Reduction.TOKEN
    balance_rate: float = 0.001


class RankProgram:
    """One rank of a program, built and ready to step.

    ``lowering`` is shared by the ranks of a process; ``communicator`` is this rank's own. Between steps
    ``sync.buckets`` hold parameters, gradients of the last step and optimizer states.

    Raises:
        ConfigError: what is asked for and the program do not fit together.
    """

    def __init__(
        self, lowering: Lowering, rank: int, communicator: Communicator, training: Training | None = None
    ) -> None:
        self.lowering, self.rank, self.communicator = lowering, rank, communicator
        self.training = training or Training()
        compiled, self.plan = lowering.compiled, lowering.compiled.plan
        self.row = lowering.row_of(rank)
        self.lane = self.plan.rows[self.row].index(rank)
        if self.training.clip is not None and compiled.dag.sync is not Barrier.GLOBAL_NORM:
            raise ConfigError(
                f"clipping needs sync: global_norm, found {compiled.dag.sync}; updates that do not wait for the norm "
                "cannot be scaled by it"
            )
        self.table = lowering.table(self.row)
        self.microbatches = sorted({int(self.plan.microbatch[action]) for action in self.table.tasks})
        stages = sorted({int(self.plan.stage[action]) for action in self.table.tasks})
        axes = axis_ranks(compiled.dag, rank, stages)
        self.place = {axis: axes[axis].index(rank) if axis in axes else 0 for axis in AXES}
        self._groups = dict(self._make_groups(axes))
        on_axes = {axis: self._groups[ranks, axis] for axis, ranks in axes.items()}
        self._inside = AxisGroups(communicator, on_axes, len(self.plan.lines))
        self.values: list[dict[str, Tensor]] = [{} for _ in range(self.plan.microbatches)]
        source = lowering.source
        held = {s: stage_storage(compiled.dag, source.cut, source, s, rank, self.place) for s in stages}
        self.device = next((run.device for each in held.values() for run in each.runs), torch.device("cpu"))
        self.sync = Sync(
            communicator, held, self.values, on_axes.get("tensor"), self.training.optimizer, self.training.clip
        )
        self.balance = Balance(lowering, held, self._groups, rank, self.training.balance_rate)
        self.losses: dict[int, Tensor] = {}
        self._constants: dict[int, dict[str, Tensor]] = {}
        self.code = tuple(bind(self))
        self.calls: list[Call] = [call for _, _, call in self.code]
        self.at = 0

    def _make_groups(self, axes: Mapping[str, Ranks]) -> Iterator[tuple[tuple[Ranks, str], Group]]:
        """Yield this rank's groups; every rank makes all groups of all ranks known in one order of labels."""
        plan, dag = self.plan, self.lowering.compiled.dag
        wanted: dict[tuple[Ranks, str], None] = {}
        for line in plan.lines:
            if isinstance(line, Line):
                wanted |= {(group, line.label): None for group in line.groups if self.rank in group and len(group) > 1}
        wanted |= {(ranks, axis): None for axis, ranks in axes.items()}
        for stage in sorted(set(layers_of(self.lowering).values())):
            if any(int(plan.stage[action]) == stage for action in self.table.tasks):
                found = token_groups(dag, stage, self.rank, self.lowering.degrees.sequence)
                wanted |= {(ranks, LABEL): None for ranks in found if len(ranks) > 1}
        for ranks, label in sorted(wanted, key=lambda each: (each[1], each[0])):
            yield (ranks, label), self.communicator.group(ranks, label)

    def group_of_line(self, line: int) -> Group | None:
        """Return this rank's group on a line of the plan (None: it is alone)."""
        found = self.plan.lines[line]
        assert isinstance(found, Line)
        return next((self._groups[g, found.label] for g in found.groups if self.rank in g and len(g) > 1), None)

    def constants(self, stage: int) -> dict[str, Tensor]:
        """Return what graphs of a stage read that is the same for every microbatch, by placeholder or node."""
        if stage not in self._constants:
            storage, cut = self.sync.stages[stage], self.lowering.source.cut
            weights = {name for name, full in cut.joint.buffers.items() if full.endswith("router.loss_weight")}
            made = {k: v for k, v in storage.buffers.items() if k not in weights}
            have, calls = made.keys(), set(cut.prelude.calls)
            outputs = []
            for node in cut.prelude.outputs:
                needs = reach(Phase.NONE, [node], calls.__contains__).inputs
                if all(each.name in have for each in needs):
                    outputs.append(node)
            prelude = reach(Phase.NONE, outputs, calls.__contains__)
            with torch.no_grad():
                call = boxed(prelude.module(cut.joint.module, device=self.lowering.source.device))
                values = call([made[node.name] for node in prelude.inputs])
            made |= dict(zip((node.name for node in prelude.outputs), values, strict=True))
            for bucket in storage.buckets.values():
                made |= bucket.fixed()
            self._constants[stage] = made
        return self._constants[stage]

    # --- a step ---

    def step(self, *inputs: Tensor) -> Tensor:
        """Run one step on the global batch, of which this rank takes its slices; return its part of the loss: the sum
        over all ranks is the loss of the step."""
        return self.run(self.slices(*inputs))

    def slices(self, *inputs: Tensor) -> dict[int, Slice]:
        """Return this rank's part of the global batch, by microbatch."""
        data, context, _ = self.lowering.state(self.row).slices(self.plan.rows[self.row])[self.lane]
        reduction, degrees = self.training.reduction, self.lowering.degrees
        return cut_batch(inputs, self.lowering.slicing, data, self.microbatches, reduction, degrees, context)

    def run(self, slices: Mapping[int, Slice], around: Callable[[Sequence[Call]], None] | None = None) -> Tensor:
        """Run one step on slices by microbatch; ``around`` runs the calls, for measuring, in place of a plain loop."""
        with torch.no_grad(), communicating(self._inside):
            self._begin(slices)
            if around is not None:
                around(self.calls)
            else:
                for at, call in enumerate(self.calls):
                    self.at = at
                    call()
            self.balance.update(self.communicator)
            return self._loss(slices)

    def where(self) -> str:
        """Say at which action this rank is."""
        return self.where_is(self.at) if self.code else "nothing"

    def where_is(self, at: int) -> str:
        """Name a call by its place."""
        action, do, _ = self.code[at]
        return str(self.plan.action(action)) + {Do.RUN: "", Do.START: " (start)", Do.WAIT: " (wait)"}[do]

    def _begin(self, slices: Mapping[int, Slice]) -> None:
        self.sync.begin()
        self.losses.clear()
        lowering, given = self.lowering, self.table.given
        joint = lowering.source.cut.joint
        weights = [p for p, name in joint.buffers.items() if name.endswith("router.loss_weight") and p in given]
        inputs = [(i, name) for i, name in enumerate(joint.inputs) if name in given]
        for microbatch in self.microbatches:
            held, mine = self.values[microbatch], slices[microbatch]
            held.clear()
            held.update({name: mine.inputs[i] for i, name in inputs})
            held.update({name: self._full(name, mine.auxiliary) for name in weights})
            if lowering.tangent in given:
                held[lowering.tangent] = self._full(lowering.tangent, mine.weight)

    def _full(self, name: str, value: float) -> Tensor:
        like = self.lowering.values[name]
        return torch.full(tuple(like.shape), value, dtype=like.dtype, device=self.device)

    def _loss(self, slices: Mapping[int, Slice]) -> Tensor:
        share = 1.0 / self.lowering.degrees.tensor
        total = torch.zeros((), dtype=torch.float64)
        for microbatch, loss in self.losses.items():
            total += loss.double() * (slices[microbatch].weight * share)
        return total
