"""Messages of a plan: one each time that data goes from one row to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Ints, Mask
from piper_core.schedule.plan import CODE, StreamKind
from search.direct.draft import Draft
from search.simulator.lower import COMM_KINDS, CommKind

PIPELINE = COMM_KINDS.index(CommKind.PIPELINE)


@dataclass(frozen=True, slots=True)
class Messages:
    """Units of messages, shape (n,): both ends and their rows, the pieces that make and take what they carry, the stage
    that it comes from or goes back to, whether it is an activation."""

    send: Ints
    recv: Ints
    source: Ints
    target: Ints
    producer: Ints
    consumer: Ints
    boundary: Ints
    forward: Mask


def add_messages(draft: Draft) -> Messages:
    """Add a send and a receive for each hop; a channel is a queue at each of its ends."""
    step, order, macros, hops = draft.step, draft.order, draft.macros, draft.order.hops
    producer, consumer = draft.unit(hops.source, "leave"), draft.unit(hops.target, "enter")
    source, target, back = order.row[hops.source], order.row[hops.target], 1 - hops.forward
    place, n, microbatch = macros.place[consumer], len(hops.source), order.microbatch[hops.source]
    ends: list[Ints] = []
    for verb, kind, macro, row, peer in (
        ("SEND", StreamKind.SEND, hops.source, source, target), ("RECV", StreamKind.RECV, hops.target, target, source),
    ):  # fmt: skip
        code = np.where(hops.forward, CODE[ActionKind(f"{verb}_F")], CODE[ActionKind(f"{verb}_B")])
        queue = int(kind) * (len(step.streams) + 1) * draft.width + peer * 2 + back
        ends.append(
            draft.columns.add(
                n, place, price=draft.prices.send + hops.pair, kind=code, stage=order.stage[macro],
                microbatch=microbatch, row=row, queue=queue, line=hops.line, comm=PIPELINE,
            )
        )  # fmt: skip
    draft.link(producer, ends[0])
    draft.link(ends[1], consumer)
    return Messages(ends[0], ends[1], source, target, producer, consumer, hops.boundary, hops.forward)
