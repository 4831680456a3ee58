"""What training software does that no strategy says."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.names import Collective, Phase, Region

DENSE = (Region.ATTENTION, Region.MLP)
"""Regions whose column-parallel layers may be two modules."""
REDUCES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Software:
    """Habits of a training program; the defaults are those of this project's own runtime.

    ``gradient_bytes`` is the width in which gradients are accumulated, and reduced under ZeRO-0/1. With
    ``separate_projections`` the column-parallel layers of a region (queries beside keys and values, gate beside up) are
    two modules, each of which reduces its own part of the input's gradient. ``shard_group`` > 0 shards optimiser state
    over as many neighbours of the data-parallel group instead of all of it.
    """

    gradient_bytes: int = 4
    separate_projections: bool = False
    shard_group: int = 0

    def repeats(self, region: Region, phase: Phase, kind: Collective) -> int:
        """Return how often a region's tensor-parallel collective runs where the contract has it once."""
        twice = self.separate_projections and region in DENSE
        return 2 if twice and phase in (Phase.B, Phase.BI) and kind in REDUCES else 1


OWN = Software()
"""This project's own runtime."""
