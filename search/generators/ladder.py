"""Configurations that differ in what they recompute, more and more of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from search.space import Configuration


@dataclass(frozen=True, slots=True)
class Ladder:
    """Configurations as ``lowest``, but with the policies of ``recompute``; each is made when it is looked at, which
    few are."""

    lowest: Configuration
    recompute: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.recompute)

    def __iter__(self) -> Iterator[Configuration]:
        return (self[rung] for rung in range(len(self)))

    def __getitem__(self, rung: int) -> Configuration:
        policy = self.recompute[rung]
        return self.lowest if policy == self.lowest.recompute else replace(self.lowest, recompute=policy)

    def above(self, rung: int) -> Ladder:
        """Return those from a rung on."""
        return Ladder(self.lowest, self.recompute[rung:])

    def with_zero(self, zero: int, bucket: int, prefetch: int, streams: str) -> Ladder:
        """Return the same with a ZeRO stage, bucket, prefetch and streams."""
        lowest = replace(self.lowest, zero=zero, bucket=bucket, prefetch=prefetch, streams=streams)
        return Ladder(lowest, self.recompute)
