"""What training software does that no strategy says."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.names import Collective, Phase, Region
from piper_core.passes.gradient_sync import GRAD_BYTES

BLOCKS = (Region.ATTENTION, Region.MLP)
GATE_AND_UP = 2
"""Column-parallel modules of a gated feed-forward that keeps gate and up apart."""
HIDDEN = 0.13
"""What is left of a collective beside products: the two slow each other (OVERLAP_SLOWDOWN)."""
LASTS = (Region.MLP, Region.EXPERT)
"""Regions that end a layer."""
REDUCES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Software:
    """Habits of a training program; the defaults are those of this project's own runtime.

    ``gradient_bytes`` is the width in which gradients are accumulated, and reduced under ZeRO-0/1. With
    ``separate_gate`` gate and up are modules, each of which reduces its part of the input's gradient. With
    ``hides_backward`` a whole backward reduces that gradient, and gathers the input again, beside its own products
    (Megatron since 2022, Korthikanti 2022, arXiv 2205.05198, section 4.2.2): what is left is what they slow each other.
    With ``keeps_gathered`` what sequence parallelism gathers in F is kept for the backward instead of gathered again.
    With ``gathers_logits`` each tensor-parallel rank computes the loss of the whole vocabulary.
    ``shard_group`` > 0 shards optimiser state over as many neighbours of the data-parallel group instead of all of it.
    ``message_hold_s`` is how long compute stands still at each message that it sends; with ``blocks_messages`` compute
    stands still while a message is sent or received. With ``repeats_layers`` full recompute runs layers to their end,
    as Megatron's does, though nobody asks for what they hand on.
    """

    gradient_bytes: int = 4
    separate_gate: bool = False
    hides_backward: bool = False
    keeps_gathered: bool = False
    gathers_logits: bool = False
    shard_group: int = 0
    message_hold_s: float = 0.0
    blocks_messages: bool = False
    repeats_layers: bool = False

    def gathers_loss(self, region: Region, phase: Phase, kind: Collective) -> bool:
        """Return whether a tensor-parallel collective is the sum of a loss, in place of which logits are gathered."""
        return self.gathers_logits and region is Region.HEAD and phase is Phase.F and kind is Collective.ALL_REDUCE

    def owners(self, ranks: int, zero: int) -> int:
        """Return how many of the ranks that hold a parameter share its optimiser state."""
        group = min(ranks, self.shard_group) if zero == 1 and self.shard_group else ranks
        return group if zero else 1

    def gradient_width(self, zero: int) -> int:
        """Return the bytes of a gradient that a rank accumulates and reduces; ZeRO-2/3 keep a shard in fp32."""
        return GRAD_BYTES if zero >= 2 else self.gradient_bytes

    def exposed(self, region: Region, phase: Phase, kind: Collective) -> float:
        """Return the part of a region's tensor-parallel collective that compute waits for; over 1 where it runs more
        often than the contract has it."""
        if phase is Phase.R and region in LASTS and kind in REDUCES and not self.repeats_layers:
            return 0.0
        backward = phase in (Phase.B, Phase.BI)
        split = self.separate_gate and region is Region.MLP and backward and kind in REDUCES
        times = float(GATE_AND_UP if split else 1)
        # of the gathers of a whole backward one is of the output's gradient, where the region has any to gather
        gradients = 1 if phase is Phase.B and region in BLOCKS else 0
        if self.keeps_gathered and kind is Collective.ALL_GATHER and phase in (Phase.B, Phase.BW):
            return 1.0 if region is Region.EMBED else gradients / 2
        if not self.hides_backward or phase is not Phase.B or region not in BLOCKS:
            return times
        return times * (HIDDEN if kind in REDUCES else (1 + HIDDEN) / 2)


OWN = Software()
"""This project's own runtime."""
