"""What training software does that no strategy says."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.names import Collective, Phase, Region

PROJECTIONS = {Region.ATTENTION: 3, Region.MLP: 2}
"""Column-parallel layers of a region as modules of their own: queries, keys, values; gate, up."""
HIDDEN = 0.13
"""What is left of a collective beside products: the two slow each other (OVERLAP_SLOWDOWN)."""
REDUCES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Software:
    """Habits of a training program; the defaults are those of this project's own runtime.

    ``gradient_bytes`` is the width in which gradients are accumulated, and reduced under ZeRO-0/1. With
    ``separate_projections`` the column-parallel layers of a region are modules of their own, each of which reduces its
    part of the input's gradient. With ``hides_backward`` a whole backward reduces that gradient, and gathers the input
    again, beside its own products (Megatron since 2022, Korthikanti 2022, arXiv 2205.05198, section 4.2.2): what is
    left is what they slow each other. With ``gathers_logits`` each tensor-parallel rank computes the loss of the whole
    vocabulary. ``shard_group`` > 0 shards optimiser state over as many neighbours of the data-parallel group instead of
    all of it. ``message_hold_s`` is how long compute stands still at each message that it sends.
    """

    gradient_bytes: int = 4
    separate_projections: bool = False
    hides_backward: bool = False
    gathers_logits: bool = False
    shard_group: int = 0
    message_hold_s: float = 0.0

    def exposed(self, region: Region, phase: Phase, kind: Collective) -> float:
        """Return the part of a region's tensor-parallel collective that compute waits for; over 1 where it runs more
        often than the contract has it."""
        again = self.separate_projections and phase in (Phase.B, Phase.BI) and kind in REDUCES
        times = PROJECTIONS.get(region, 1) if again else 1
        if not self.hides_backward or phase is not Phase.B or region not in PROJECTIONS:
            return float(times)
        # of a backward's two gathers, one is of the output's gradient, which everything waits for
        return times * (HIDDEN if kind in REDUCES else (1 + HIDDEN) / 2)


OWN = Software()
"""This project's own runtime."""
