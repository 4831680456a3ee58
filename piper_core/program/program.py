"""A program: directives in canonical order, and the one way to apply them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from piper_core.directives import CANONICAL, Directive, Order, Place, Split, parse_directive
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Mask
from piper_core.ir.edit import distinct, distinct_pairs
from piper_core.ir.filter import Filter
from piper_core.names import Phase
from piper_core.passes.gradient_sync import gradient_sync
from piper_core.passes.layout import check_layout
from piper_core.passes.lower_backward import lower_backward
from piper_core.passes.send_recv import send_recv
from piper_core.passes.update import close_step, with_row

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

MAX_DIRECTIVES = 100_000


@dataclass(frozen=True, slots=True)
class Program:
    """An ordered tuple of directives.

    ``apply`` runs them in canonical order (stage, split, backward lowering, place, shard, replicate, recompute,
    order), whatever the order here; ``canonical`` says whether that changed anything.
    """

    directives: tuple[Directive[Any], ...]

    @staticmethod
    def parse(data: object) -> Program:
        """Read a JSON array of directives, ours or upstream Piper's.

        Raises:
            DirectiveError: with the position of the directive at fault.
        """
        if not isinstance(data, list | tuple):
            raise DirectiveError("a program is not a list of directives", found=repr(data)[:60])
        if len(data) > MAX_DIRECTIVES:
            raise DirectiveError(f"a program of {len(data)} directives", expected=f"at most {MAX_DIRECTIVES}")
        read: list[Directive[Any]] = []
        for i, item in enumerate(data):
            try:
                read.append(parse_directive(item))
            except DirectiveError as error:
                raise error.at(f"directive {i + 1} of {len(data)}, {_short(item)}") from None
        return Program(tuple(read))

    def to_data(self) -> list[dict[str, Any]]:
        """Return the JSON form; the inverse of :meth:`parse`."""
        return [directive.to_data() for directive in self.directives]

    @property
    def ordered(self) -> tuple[Directive[Any], ...]:
        """The directives in canonical order (a stable sort by kind)."""
        return tuple(sorted(self.directives, key=lambda directive: CANONICAL.index(type(directive))))

    @property
    def canonical(self) -> bool:
        """Whether the directives stand in canonical order already."""
        return self.ordered == self.directives

    def where(self, directive: Directive[Any]) -> str:
        """Return a directive's position for messages: ``directive 4 of 11, order(...)``."""
        at = next(i for i, other in enumerate(self.directives) if other is directive)
        return f"directive {at + 1} of {len(self.directives)}, {_short(directive.to_data())}"

    def apply(self, dag: Dag, mesh: Mesh | None = None) -> Dag:
        """Return the compiled DAG: every directive applied, messages, reductions and updates inserted.

        A program without ``split`` has one microbatch, one without ``stage`` or PP tags one stage, one without
        ``place`` one rank. ``dag`` is left as it was.

        Raises:
            DirectiveError: a directive does not apply, with its position; nothing is half applied.
        """
        dag = self._until(None, dag, mesh)
        return replace(dag, notes=(*dag.notes, *_idle_ranks(dag)))

    def before(self, kind: type[Directive[Any]], dag: Dag, mesh: Mesh | None = None) -> Dag:
        """Return the DAG that directives of a kind meet: what ``domain`` and ``neighbours`` of them ask for.

        Raises:
            DirectiveError: an earlier directive does not apply.
        """
        return self._until(kind, dag, mesh)

    def _until(self, last: type[Directive[Any]] | None, dag: Dag, mesh: Mesh | None) -> Dag:
        """Return the DAG before the directives of the ``last`` kind, or after all."""
        for kind in CANONICAL:
            chosen = [directive for directive in self.directives if type(directive) is kind]
            if kind is Split and not chosen:
                chosen = [Split(Filter(()), 1, "MB")]
            if kind is Place:
                dag = self._lower(dag)
            if kind is Order:
                dag = close_step(gradient_sync(send_recv(_complete(dag))))
            if kind is last:
                return dag
            dag = self._apply_kind(dag, kind, chosen, mesh)
            if kind is Place and not chosen:
                dag = with_row(dag)
            if kind is Split and not dag.stages:
                notes = (*dag.notes, "no PP tags and no stage directive: one stage")
                dag = replace(dag, nodes=dag.nodes.with_(stage=0), notes=notes)
        return dag

    def _apply_kind(
        self, dag: Dag, kind: type[Directive[Any]], chosen: Sequence[Directive[Any]], mesh: Mesh | None
    ) -> Dag:
        edits = []
        for directive in chosen:
            try:
                edits.append(directive.check(dag, mesh))
            except DirectiveError as error:
                raise error.at(self._where(directive)) from None
        try:
            return kind.rewrite(dag, edits)
        except DirectiveError as error:
            at, error = _first_refused(kind, dag, edits, error)
            raise error.at(self._where(chosen[at])) from None

    def _where(self, directive: Directive[Any]) -> str:
        return self.where(directive) if any(directive is other for other in self.directives) else "default split"

    def _lower(self, dag: Dag) -> Dag:
        """Lower the backwards that an order names in parts (see ``passes/lower_backward``)."""
        mask: Mask = np.zeros(len(dag), np.bool_)
        apart: set[tuple[int, int]] = set()
        for directive in self.directives:
            if not isinstance(directive, Order):
                continue
            for _, slots in directive.actions:
                for slot in slots:
                    apart.update((a.stage, a.microbatch or 0) for a in slot if a.kind.value in ("BI", "BW"))
            for filter_, _ in directive.lowered():
                try:
                    mask |= filter_.mask(dag)
                except DirectiveError as error:
                    raise error.at(self.where(directive)) from None
        if apart:
            stages, m = max(1, dag.stages), max(1, dag.microbatches)
            table = np.zeros((stages, m), np.bool_)
            for stage, microbatch in apart:
                if stage < stages and microbatch < m:
                    table[stage, microbatch] = True
            mask |= table[np.maximum(dag.nodes.stage, 0), np.maximum(dag.nodes.microbatch, 0)]
        return lower_backward(dag, mask)


def _first_refused(
    kind: type[Directive[Any]], dag: Dag, edits: Sequence[Any], error: DirectiveError
) -> tuple[int, DirectiveError]:
    """Return the index of the first edit that cannot be applied with those before it, and why; all give ``error``."""
    low, high = 0, len(edits) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            kind.rewrite(dag, edits[: middle + 1])
            low = middle + 1
        except DirectiveError as found:
            high, error = middle, found
    return high, error


def _complete(dag: Dag) -> Dag:
    """Refuse compute that no place directive reached; give an unstaged model its one stage."""
    nodes = dag.nodes
    missing = np.flatnonzero(dag.compute & (nodes.group < 0))
    if len(missing):
        stages = sorted(set(nodes.stage[missing].tolist()))
        raise DirectiveError(
            f"{len(missing)} compute nodes are not placed, first {dag.chunks[nodes.chunk[missing[0]]].name}"
            + (f" of stage {stages[0]}" if stages[0] >= 0 else ""),
            expected="a place directive for every stage",
        )
    return check_layout(_contiguous(_together(dag)))


def _together(dag: Dag) -> Dag:
    """Refuse a stage of which one microbatch lies on two rows.

    Raises:
        DirectiveError: naming the rows.
    """
    nodes, index = dag.nodes, np.flatnonzero(dag.compute)
    width = max(1, dag.microbatches)
    unit = nodes.stage[index].astype(np.int64) * width + np.maximum(nodes.microbatch[index], 0)
    pairs = distinct(unit * len(dag.groups) + nodes.group[index])
    twice = np.flatnonzero(np.diff(pairs // len(dag.groups)) == 0)
    if len(twice):
        at = int(twice[0])
        a, b = (list(dag.groups[int(g)]) for g in pairs[at : at + 2] % len(dag.groups))
        stage, microbatch = divmod(int(pairs[at]) // len(dag.groups), width)
        raise DirectiveError(
            f"stage {stage} of microbatch {microbatch} lies on {a} and on {b}", expected="a stage on one row for each "
            "microbatch", hint="cut the model into more stages",
        )  # fmt: skip
    return dag


def _idle_ranks(dag: Dag) -> tuple[str, ...]:
    """Return a note on the first row where two ranks do the same work, since no directive tells them apart."""
    index = np.flatnonzero(dag.compute)
    for group, state in distinct_pairs(dag.nodes.group[index], dag.nodes.state[index]):
        row, held = dag.groups[group], dag.states[state]
        parts = set(zip(held.slices(row), held.tensor_places(row), strict=True))
        if len(parts) < len(row):
            return (
                f"some of ranks {list(row)[:8]} do the same work: no replicate or shard directive tells them apart",
            )
    return ()


def _contiguous(dag: Dag) -> Dag:
    """Refuse stages that data flows back into: stage numbers must not fall along any activation.

    Raises:
        DirectiveError: naming the two chunks.
    """
    stage = dag.nodes.stage
    forward = np.flatnonzero(dag.compute & (dag.nodes.phase == Phase.F))
    of_chunk = np.full(len(dag.chunks), -1, np.int32)
    of_chunk[dag.nodes.chunk[forward]] = stage[forward]
    for u, v, _ in dag.model.edges:
        if of_chunk[u] > of_chunk[v]:
            raise DirectiveError(
                f"stages are not contiguous: {dag.chunks[u].name} of stage {of_chunk[u]} feeds {dag.chunks[v].name} "
                f"of stage {of_chunk[v]}",
                expected="stage numbers that never fall along the model",
            )
    return dag


def _short(data: object) -> str:
    """Return ``op(...)`` for a directive's data, cut to a readable length."""
    if not isinstance(data, dict):
        return repr(data)[:40]
    rest = json.dumps({k: v for k, v in data.items() if k != "op"}, default=repr)[1:-1]
    return f"{data.get('op', '?')!s:.20}({rest if len(rest) <= 60 else rest[:57] + '...'})"
