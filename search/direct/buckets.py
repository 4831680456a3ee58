"""The buckets of a model's parameters, stage by stage, as ``passes.gradient_sync`` cuts them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from piper_core.ir.dag import Ints
from piper_core.names import Region
from search.direct.kinds import REGIONS, Kinds


@dataclass(frozen=True, slots=True)
class Buckets:
    """Columns of shape (B,): ``stage``, ``expert`` (sharded experts), ``numel`` on one rank when gathered, ``low`` and
    ``high`` (first and last chunk). ``parts`` are chunks, ``parts[start[k]:start[k + 1]]`` those of bucket k. ``tied``
    maps (tie, chunk) to the bucket that holds the tied parameter of the chunk."""

    stage: Ints
    expert: Ints
    numel: Ints
    low: Ints
    high: Ints
    start: Ints
    parts: Ints
    tied: dict[tuple[str, int], int]

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def form(self) -> tuple[Hashable, ...]:
        """All but how much they hold."""
        columns = self.stage, self.expert, self.low, self.high, self.start, self.parts
        return *(column.tobytes() for column in columns), tuple(self.tied.items())


def make_buckets(kinds: Kinds, ends: Sequence[int], tp: int, ep: int, limit: int) -> Buckets:
    """Cut the parameters of the stages, ``ends[s]`` to ``ends[s + 1]`` the chunks of stage s, into runs of at most
    ``limit`` elements (0: no limit)."""
    expert = REGIONS.index(Region.EXPERT)
    region, of = kinds.region.tolist(), kinds.of.tolist()
    held: dict[tuple[int, bool], list[tuple[bool, int, str]]] = {}
    for kind, pieces in enumerate(kinds.parameters):
        for inside in (False, True):
            held[kind, inside] = [
                (
                    piece.expert and inside and ep > 1,
                    piece.numel // (tp if piece.tensor else 1) // (ep if piece.expert and inside else 1),
                    piece.tie,
                )
                for piece in pieces
            ]
    rows: list[tuple[int, bool, int, list[int]]] = []
    tied: dict[tuple[str, int], int] = {}
    for stage in range(len(ends) - 1):
        runs: dict[bool, list[tuple[int, int, str]]] = {}
        for chunk in range(ends[stage], ends[stage + 1]):
            for sharded, numel, tie in held[of[chunk], region[chunk] == expert]:
                runs.setdefault(sharded, []).append((chunk, numel, tie))
        for sharded, run in runs.items():
            total, parts = 0, list[int]()
            for chunk, numel, tie in run:
                if parts and limit and total + numel > limit:
                    rows.append((stage, sharded, total, parts))
                    total, parts = 0, []
                total += numel
                if not parts or parts[-1] != chunk:
                    parts.append(chunk)
                if tie:
                    tied[tie, chunk] = len(rows)
            rows.append((stage, sharded, total, parts))
    sizes = [len(parts) for *_, parts in rows]
    return Buckets(
        np.asarray([row[0] for row in rows], np.int32), np.asarray([row[1] for row in rows], np.bool_),
        np.asarray([row[2] for row in rows], np.int64), np.asarray([row[3][0] for row in rows], np.int32),
        np.asarray([row[3][-1] for row in rows], np.int32), np.concatenate([[0], np.cumsum(sizes)]),
        np.asarray([chunk for *_, parts in rows for chunk in parts], np.int32), tied,
    )  # fmt: skip
