"""What all ranks of a program share: graphs, tables of rows, how the batch is cut."""

from __future__ import annotations

from functools import cached_property

import torch

from piper_core.errors import ConfigError
from piper_core.frontend.cut import tensors
from piper_core.frontend.rank_graphs import routed_counts
from piper_core.frontend.run import Compiler
from piper_core.ir.action import ActionKind
from piper_core.ir.shard_state import ShardState
from piper_core.names import Phase
from piper_core.runtime.compiled import CompiledMacros
from piper_core.runtime.graphs import Macros, Spec
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.model import ModelSource
from piper_core.runtime.slices import Slicing
from piper_core.runtime.tables import RowTable, constant_names, row_table
from piper_core.schedule.compile import Compiled
from piper_core.schedule.plan import CODE


class Lowering:
    """A compiled program and a model, ready for ranks to be built of: one for a process, whatever ranks it runs.

    Raises:
        ConfigError: program and model do not fit together.
    """

    def __init__(self, compiled: Compiled, source: ModelSource, *, compiler: Compiler = "none") -> None:
        self.compiled, self.source = compiled, source
        self.degrees = degrees_of(compiled.dag)
        if source.degrees != self.degrees:
            raise ConfigError(f"the program divides the model by {self.degrees}, its graphs by {source.degrees}")
        joint = source.cut.joint
        if len(joint.outputs) != 1 or len(joint.tangents) != 1 or tensors(joint.outputs[0])[0].dim():
            raise ConfigError("a model that trains returns its loss, one scalar")
        fuse, device = source.dtype in (torch.float32, torch.float64), source.device
        self.macros = Macros(source.cut, fuse=fuse, device=device)
        if compiler == "inductor":
            recomputes = bool((compiled.dag.nodes.phase == Phase.R).any())
            self.macros = CompiledMacros(source.cut, fuse=fuse, device=device, recomputes=recomputes)
        self.loss, self.tangent = joint.outputs[0].name, joint.tangents[0]
        counts = routed_counts(source.cut)
        biased = {name for name in joint.buffers.values() if name.endswith("router.bias")}
        self.counts = {layer: name for layer, name in counts.items() if f"layers.{layer}.moe.router.bias" in biased}
        self.values = {node.name: tensors(node)[0] for node in joint.nodes if len(tensors(node)) == 1}
        self._tables: dict[int, RowTable] = {}
        self._outputs: dict[tuple[int, Spec], frozenset[str]] = {}

    def table(self, row: int) -> RowTable:
        """Return what a row does."""
        if row not in self._tables:
            results = frozenset((self.loss, *self.counts.values()))
            self._tables[row] = row_table(self.compiled, self.macros, row, results)
        return self._tables[row]

    def outputs(self, row: int, spec: Spec) -> frozenset[str]:
        """Return what an action must hand out, in some microbatch of a row."""
        key = (row, spec)
        if key not in self._outputs:
            tasks = self.table(row).tasks.values()
            self._outputs[key] = frozenset(name for task in tasks if task.spec == spec for name in task.outputs)
        return self._outputs[key]

    def row_of(self, rank: int) -> int:
        """Return the row that a rank is in.

        Raises:
            ConfigError: the program has no such rank.
        """
        for row, ranks in enumerate(self.compiled.plan.rows):
            if rank in ranks:
                return row
        raise ConfigError(f"the program has no rank {rank}; its ranks are {self.ranks}")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the program."""
        return tuple(sorted(rank for row in self.compiled.plan.rows for rank in row))

    def state(self, row: int) -> ShardState:
        """Return how a row divides its first stage; data is divided alike for all."""
        return state_of(self.compiled, row)

    @cached_property
    def constant_names(self) -> frozenset[str]:
        """Return the values that are the same for every microbatch."""
        return constant_names(self.source.cut)

    @cached_property
    def slicing(self) -> Slicing:
        """How the global batch is cut."""
        return slicing_of(self.compiled)

    @property
    def has_norm(self) -> bool:
        """Whether the plan measures the global norm."""
        return bool((self.compiled.plan.kind == CODE[ActionKind.NORM]).any())


def state_of(compiled: Compiled, row: int) -> ShardState:
    """Return how a row divides its first stage."""
    dag, group = compiled.dag, compiled.dag.groups.index(compiled.plan.rows[row])
    mine = dag.compute & (dag.nodes.group == group) & (dag.nodes.phase == Phase.F)
    return dag.states[int(dag.nodes.state[mine][0])]


def slicing_of(compiled: Compiled) -> Slicing:
    """Return how a program cuts the global batch.

    Raises:
        ConfigError: its microbatches are not equal, or not of whole sequences.
    """
    dag = compiled.dag
    forwards = dag.compute & (dag.nodes.phase == Phase.F)
    sizes = set(dag.sequences()[forwards].tolist())
    sequences = sizes.pop()
    if sizes or not sequences.is_integer():
        raise ConfigError(f"microbatches must be equal and of whole sequences, found {sequences:g} sequences")
    replicas = state_of(compiled, 0).data_degree(compiled.plan.rows[0])
    made = Slicing(replicas, compiled.plan.microbatches, int(sequences))
    if dag.global_batch is not None and made.batch != dag.global_batch:
        raise ConfigError(f"microbatches of {made.sequences} sequences make {made.batch}, not {dag.global_batch}")
    return made
