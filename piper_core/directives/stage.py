"""stage: cut an untagged model into pipeline stages between layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import check_fields, read_int, read_ints
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Ints

if TYPE_CHECKING:
    from piper_core.mesh import Mesh


def layer_weights(dag: Dag) -> list[float]:
    """Return the FLOPs of each layer for one sequence; embedding and head are added to the first and last."""
    layers = max(1, dag.model.layers)
    weights = [0.0] * layers
    for chunk in dag.chunks:
        weights[min(max(chunk.layer, 0), layers - 1)] += chunk.flops
    return weights


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return layers per stage such that the heaviest stage is as light as can be (exact, by bisection on values).

    Ties are broken towards equal counts from the front.
    """
    n = len(weights)
    sums = [0.0, *accumulate(weights)]

    def cut(limit: float) -> list[int] | None:
        counts, start = [], 0
        for left in range(stages, 0, -1):
            end = start + 1
            even = start + -(-(n - start) // left)
            while (
                end < n - left + 1
                and sums[end + 1] - sums[start] <= limit
                and (end < even or sums[n] - sums[end] > limit * (left - 1))
            ):
                end += 1
            if left == 1:
                end = n
            if sums[end] - sums[start] > limit:
                return None
            counts.append(end - start)
            start = end
        return counts

    values = sorted({sums[j] - sums[i] for i in range(n) for j in range(i + 1, n + 1)})
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(values[middle]) else (middle + 1, high)
    return tuple(cut(values[low]) or ())


def holds_nothing(counts: Sequence[int]) -> bool:
    """Return whether a stage has no layer, and neither the embedding nor the head by itself."""
    ends = (0, len(counts) - 1) if len(counts) > 1 else ()
    return not counts or any(n < (0 if s in ends else 1) for s, n in enumerate(counts))


@dataclass(frozen=True, slots=True)
class Stage(Directive["Ints"]):
    """Set ``PP`` from ``LAYER``: by cuts (first layer of each stage but the first), by layers per stage, or
    into a number of ``stages`` whose heaviest is as light as can be. Uneven is legal; no layer is dropped. The first
    stage may hold the embedding alone, the last one the head: 0 layers.

    Rewrite::

        LAYER -1 0 1 2 3 4     cuts: [2]     PP 0 0 0 1 1 1
    """

    op: ClassVar[str] = "stage"
    cuts: tuple[int, ...] | None = None
    layers_per_stage: tuple[int, ...] | None = None
    stages: int | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Stage:
        check_fields(data, (), ("cuts", "layers_per_stage", "stages"))
        given = [name for name in ("cuts", "layers_per_stage", "stages") if data.get(name) is not None]
        if len(given) != 1:
            raise DirectiveError("stage takes one of cuts, layers_per_stage, stages", found=", ".join(given) or "none")
        stages = read_int(data, "stages", least=1) if given == ["stages"] else None
        return cls(read_ints(data, "cuts"), read_ints(data, "layers_per_stage"), stages)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"op": self.op}
        if self.cuts is not None:
            data["cuts"] = list(self.cuts)
        if self.layers_per_stage is not None:
            data["layers_per_stage"] = list(self.layers_per_stage)
        if self.stages is not None:
            data["stages"] = self.stages
        return data

    def counts(self, dag: Dag) -> tuple[int, ...]:
        """Return layers per stage on this model.

        Raises:
            DirectiveError: the numbers do not cut ``dag.model.layers`` layers into non-empty runs.
        """
        layers = dag.model.layers
        if self.stages is not None:
            if self.stages > layers:
                raise DirectiveError(f"{self.stages} stages of {layers} layers", expected=f"1-{layers} stages")
            return balanced(layer_weights(dag), self.stages)
        if self.layers_per_stage is not None:
            counts = self.layers_per_stage
            if holds_nothing(counts) or sum(counts) != layers:
                raise DirectiveError(
                    "layers_per_stage has an empty stage"
                    if holds_nothing(counts)
                    else f"layers_per_stage adds up to {sum(counts)} of {layers} layers",
                    expected=f"positive counts with sum {layers} (0 for a first stage of the embedding alone, "
                    "or a last one of the head)",
                    found=str(list(counts)),
                )
            return counts
        ends = (0, *(self.cuts or ()), layers)
        if any(a >= b for a, b in pairwise(ends)):
            raise DirectiveError(
                "cuts are not increasing inside the model",
                expected=f"rising, within 1-{layers - 1}",
                found=str(list(self.cuts or ())),
            )
        return tuple(b - a for a, b in pairwise(ends))

    def check(self, dag: Dag, mesh: Mesh | None = None) -> Ints:
        if dag.stages:
            raise DirectiveError("the model already carries PP tags", hint="drop the stage directive")
        if dag.microbatches or dag.groups:
            raise DirectiveError("stage comes after split or place", expected="stage first")
        counts = self.counts(dag)
        stage_of = np.concatenate([np.repeat(np.arange(len(counts)), counts), [len(counts) - 1, 0]])
        layer = dag.chunk_tag("LAYER")[dag.nodes.chunk]  # -1, the embedding, is the last entry
        return stage_of[np.minimum(layer, dag.model.layers)].astype(np.int32)

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[Ints]) -> Dag:
        if len(edits) > 1:
            raise DirectiveError("two stage directives", expected="one")
        return replace(dag, nodes=dag.nodes.with_(stage=edits[0])) if edits else dag

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        layers = dag.model.layers

        def draw(rng: Random) -> Stage:
            n = rng.randint(1, min(layers, 8))
            match rng.randrange(3):
                case 0:
                    return cls(cuts=tuple(sorted(rng.sample(range(1, layers), n - 1))))
                case 1:
                    ends = (0, *sorted(rng.sample(range(1, layers), n - 1)), layers)
                    return cls(layers_per_stage=tuple(b - a for a, b in pairwise(ends)))
                case _:
                    return cls(stages=n)

        fields = {
            "cuts": f"increasing, within 1-{layers - 1}",
            "layers_per_stage": f"positive, sum {layers}",
            "stages": f"1-{layers}",
        }
        return Domain(fields, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Stage]:
        """Shift each cut by one layer."""
        counts = self.counts(dag)
        for i in range(len(counts) - 1):
            for step in (-1, 1):
                moved = list(counts)
                moved[i] += step
                moved[i + 1] -= step
                if min(moved) >= 1:
                    yield Stage(layers_per_stage=tuple(moved))
