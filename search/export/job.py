"""A strategy in the words of other systems: degrees, layers of each stage, what is sharded and recomputed.

All of it is read from the compiled DAG and plan, never from the header, so that a hand-edited program is described as
it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from piper_core.arch.record import Architecture
from piper_core.directives import Order
from piper_core.errors import ConfigError
from piper_core.ir.dag import Dag, Policy
from piper_core.ir.edit import rows
from piper_core.ir.shard_state import ShardState
from piper_core.names import Phase
from piper_core.program.strategy import DEFAULT_SEQ_LEN, Strategy, base_dag
from piper_core.schedule.compile import Compiled, compile_program
from piper_core.schedule.grid import Layout, rows_of_stage

RECOMPUTE = {Policy.NONE: "none", Policy.SELECTIVE: "selective", Policy.FULL: "full", Policy.FULL_INNER: "full"}
_SYNTHETIC = ("dense:", "moe:")


@dataclass(frozen=True)
class Job:
    """A compiled strategy as others describe one.

    ``dp`` counts the ranks of a row that divide the batch, ``ep`` lies inside dp x cp. ``layers`` is by stage;
    ``rows_of`` the rows that hold each stage; ``recompute`` is by layer: none, selective, full, or mixed where it
    differs inside the layer or between microbatches.

    Raises:
        ConfigError: from a degree that differs between stages, when it is asked for.
    """

    strategy: Strategy
    compiled: Compiled
    architecture: Architecture | None

    @property
    def dag(self) -> Dag:
        return self.compiled.dag

    @property
    def name(self) -> str:
        """What the model is called, in letters that any file may hold: the last part of a path."""
        name = self.architecture.name if self.architecture else str(self.strategy.header.model or "model")
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rpartition("/")[2]) or "model"

    @property
    def pp(self) -> int:
        """Number of pipeline rows."""
        return len(self.compiled.plan.rows)

    @property
    def gpus(self) -> int:
        return len({rank for row in self.compiled.plan.rows for rank in row})

    @property
    def stages(self) -> int:
        return self.compiled.plan.stages

    @property
    def microbatches(self) -> int:
        return self.compiled.plan.microbatches

    @cached_property
    def tp(self) -> int:
        return self._one("tensor degree", [state.tensor_degree for state in self._states])

    @cached_property
    def sequence_parallel(self) -> bool:
        return bool(self._one("sequence parallelism", [int(state.sequence) for state in self._states]))

    @cached_property
    def cp(self) -> int:
        return self._one("context degree", [state.context_degree for state in self._states])

    @cached_property
    def ep(self) -> int:
        sharded = {state.expert_degree for state in self._states} - {1}
        return self._one("expert degree", sorted(sharded) or [1])

    @cached_property
    def zero(self) -> int:
        return self._one("ZeRO stage", [state.zero_stage for state in self._states])

    @cached_property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket, 0 for one a stage, the largest where they differ."""
        return max((state.replication.bucket_bytes for state in self._states if state.replication), default=0)

    @cached_property
    def dp(self) -> int:
        dag, index = self.dag, np.flatnonzero(self.dag.compute)
        pairs = np.unique(np.stack([dag.nodes.group[index], dag.nodes.state[index]]), axis=1).T.tolist()
        return self._one("data degree", [dag.states[state].data_degree(dag.groups[group]) for group, state in pairs])

    @cached_property
    def micro_batch(self) -> int:
        """Sequences that a data rank handles at a time (1 where nothing fixes the batch)."""
        return round(float(self.dag.sequences()[self.dag.compute].max(initial=1)))

    @property
    def global_batch(self) -> int:
        return self.strategy.header.global_batch or self.micro_batch * self.microbatches * self.dp

    @property
    def seq_len(self) -> int:
        return self.strategy.header.seq_len or (self.dag.model.seq_len if self._synthetic else DEFAULT_SEQ_LEN)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        held = {(stage, layer) for stage, layer, *_ in self._layer_table}
        return tuple(sum(stage == each for stage, _ in held) for each in range(self.stages))

    @cached_property
    def rows_of(self) -> tuple[tuple[int, ...], ...]:
        """Rows that hold each stage."""
        index = np.flatnonzero(self.dag.compute)
        order = {group: row for row, group in enumerate(rows(self.dag))}
        pairs = np.unique(np.stack([self.dag.nodes.stage[index], self.dag.nodes.group[index]]), axis=1).T.tolist()
        found: list[set[int]] = [set() for _ in range(self.stages)]
        for stage, group in pairs:
            found[max(0, stage)].add(order[group])
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def layout(self) -> Layout | None:
        """How stages lie on rows; None where no family lays them so."""
        p, stages = self.pp, self.stages
        for layout, v in ((Layout.LOOP, stages // p), (Layout.V, 2), (Layout.BIDIRECTIONAL, 1)):
            if v and stages == p * v:
                laid = rows_of_stage(layout, p, v)
                if all(set(a) == set(b) for a, b in zip(laid, self.rows_of, strict=True)):
                    return layout
        return None

    @property
    def virtual_stages(self) -> int:
        return max(1, self.stages // self.pp)

    @cached_property
    def recompute(self) -> tuple[str, ...]:
        """Policy of each layer."""
        found: dict[int, set[str]] = {}
        for _, layer, policy in self._layer_table:
            found.setdefault(layer, set()).add(RECOMPUTE[policy])
        return tuple("mixed" if len(some) > 1 else min(some) for _, some in sorted(found.items()))

    @property
    def ordered(self) -> bool:
        """Whether the order of every row comes from a directive, not from the list scheduler."""
        return any(isinstance(each, Order) for each in self.strategy.program.directives)

    @cached_property
    def in_mesh_order(self) -> bool:
        """Whether rows are consecutive runs of ranks, as launchers number them."""
        ranks = [rank for row in self.compiled.plan.rows for rank in row]
        return ranks == list(range(len(ranks)))

    @property
    def _synthetic(self) -> bool:
        return (self.strategy.header.model or "").startswith(_SYNTHETIC)

    @cached_property
    def _states(self) -> list[ShardState]:
        return [self.dag.states[i] for i in np.unique(self.dag.nodes.state[self.dag.compute]).tolist()]

    @cached_property
    def _layer_table(self) -> list[tuple[int, int, int]]:
        """Distinct (stage, layer, policy) of forward compute inside layers."""
        dag = self.dag
        index = np.flatnonzero(dag.compute & (dag.nodes.phase == Phase.F))
        layer = dag.chunk_tag("LAYER")[dag.nodes.chunk[index]]
        inside = (layer >= 0) & (layer < dag.model.layers)
        table = np.stack([np.maximum(dag.nodes.stage[index], 0), layer, dag.nodes.policy[index]])[:, inside]
        return [(int(s), int(a), int(p)) for s, a, p in np.unique(table, axis=1).T.tolist()]

    def _one(self, what: str, values: Sequence[int]) -> int:
        distinct = sorted(set(values))
        if len(distinct) != 1:
            raise ConfigError(
                f"export needs one {what} for the whole model, found {', '.join(map(str, distinct))}; no other system "
                "has a field for each stage: export such a program with --to piper or csv"
            )
        return distinct[0]


def job_of(strategy: Strategy) -> Job:
    """Compile and verify a strategy, and return it for export.

    Raises:
        ConfigError, ProgramError: no model, or one that is unknown; DirectiveError, PlanError: see ``compile_program``.
    """
    from piper_core.arch import load_architecture

    compiled = compile_program(strategy.program, base_dag(strategy), strategy.header.world)
    model = strategy.header.model
    return Job(strategy, compiled, load_architecture(model) if model and not model.startswith(_SYNTHETIC) else None)
