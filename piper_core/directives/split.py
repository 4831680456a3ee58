"""split: cut the batch into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import check_fields, read_filter, read_int, read_text
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, Nodes
from piper_core.ir.filter import Filter

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

_RESERVED = ("PP", "PASS", "LAYER", "REGION", "COMM")


@dataclass(frozen=True, slots=True)
class Split(Directive["Split"]):
    """Copy the whole model for each of ``num_microbatches`` slices of the batch (dimension 0 of the inputs).

    Rewrite::

        F -> B   becomes   F0 -> B0, F1 -> B1, ...   with tag ``dim_name`` 0, 1, ...

    The filter must match all compute: a model of which only a part is split has no meaning here.
    """

    op: ClassVar[str] = "split"
    filter: Filter
    num_microbatches: int
    dim_name: str = "MB"

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Split:
        check_fields(data, ("filter", "dim_name", "num_microbatches"))
        name = read_text(data, "dim_name", None) or "MB"
        return cls(read_filter(data), read_int(data, "num_microbatches", least=1), name)

    def to_data(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "filter": self.filter.to_data(),
            "dim_name": self.dim_name,
            "num_microbatches": self.num_microbatches,
        }

    def check(self, dag: Dag, mesh: Mesh | None = None) -> Split:
        if dag.microbatches:
            raise DirectiveError("the batch is already split", expected="one split directive")
        if dag.groups or not dag.compute.all():
            raise DirectiveError("split comes after place", expected="split before place, shard and replicate")
        if self.dim_name in _RESERVED or self.dim_name in dag.tag_names():
            raise DirectiveError(f"dim_name {self.dim_name!r} is taken", expected="a new tag such as MB")
        mask = self.filter.select(dag)
        if not mask.all():
            left = int((~mask).sum())
            raise DirectiveError(
                f"filter {self.filter} leaves {left} of {len(dag)} compute nodes unsplit",
                expected="all compute",
                hint="use {}",
            )
        if dag.global_batch is not None and dag.global_batch % self.num_microbatches:
            raise DirectiveError(
                f"global batch {dag.global_batch} does not divide into {self.num_microbatches} microbatches",
                hint="use " + _near_divisors(dag.global_batch, self.num_microbatches),
            )
        if len(dag) * self.num_microbatches > 4_000_000:
            raise DirectiveError(
                f"{self.num_microbatches} microbatches of {len(dag)} nodes", expected="at most 4 million nodes"
            )
        return self

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[Split]) -> Dag:
        if not edits:
            return dag
        if len(edits) > 1:
            raise DirectiveError("two split directives", expected="one")
        m, n, edges = edits[0].num_microbatches, len(dag), dag.edges
        copies = Nodes(**{name: np.tile(getattr(dag.nodes, name), m) for name in Nodes.__slots__}).with_(
            microbatch=np.repeat(np.arange(m), n), splits=np.tile(dag.nodes.splits, m) * m
        )
        shift = np.repeat(np.arange(m, dtype=np.int32) * n, len(edges))
        table = Edges(
            np.tile(edges.src, m) + shift,
            np.tile(edges.dst, m) + shift,
            np.tile(edges.role, m),
            np.tile(edges.payload, m),
        )
        return replace(dag, nodes=copies, edges=table, microbatches=m, split_name=edits[0].dim_name)

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        batch = dag.global_batch
        legal = [m for m in range(1, 65) if batch is None or batch % m == 0]
        fields = {"num_microbatches": "divisors of the global batch" if batch else ">= 1", "dim_name": "a new tag"}

        def draw(rng: Random) -> Split:
            return cls(Filter(()), rng.choice(legal[:16]))

        return Domain(fields, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Split]:
        """The next smaller and next larger legal number of microbatches."""
        for numbers in (
            range(self.num_microbatches - 1, 0, -1),
            range(self.num_microbatches + 1, 4 * self.num_microbatches + 1),
        ):
            for m in numbers:
                near = replace(self, num_microbatches=m)
                if near.legal(dag, mesh):
                    yield near
                    break


def _near_divisors(batch: int, m: int) -> str:
    divisors = [d for d in range(1, min(batch, 100_000) + 1) if batch % d == 0]
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - m))[:2])))
