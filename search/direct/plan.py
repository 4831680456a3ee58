"""The plan of a step under an order, with the seconds of its actions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.names import Sync
from piper_core.schedule.plan import Plan
from search.direct.form import Form, Frame, form_of
from search.direct.order import Order
from search.direct.overlap import Opened, StageNodes
from search.direct.pieces import Contents
from search.direct.prices import Prices
from search.direct.shape import Step
from search.direct.sliced import slice_step
from search.direct.tariff import tariff_of
from search.hosts import with_messages
from search.simulator.lower import ActionSeconds, Lowered
from search.sized import SizedCache

KEPT = 400_000
"""Actions of the plans whose forms are kept, 150 bytes each."""


@dataclass(frozen=True, slots=True)
class Built:
    """A plan as the simulator reads it, the form that it shares with others, the seconds of its actions, and what its
    pieces take and hold."""

    step: Step
    form: Form
    lowered: Lowered
    seconds: ActionSeconds
    contents: Contents

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.lowered.plan


class Builder:
    """Builds plans of one model on one cluster; keeps the forms of the last."""

    def __init__(self, prices: Prices, sync: Sync) -> None:
        self.prices, self.sync = prices, sync
        self.opened: dict[StageNodes, Opened] = {}
        self.forms = SizedCache(self._form, KEPT)

    def build(self, step: Step, order: Order) -> Built:
        """Return the plan of a step under an order.

        Raises:
            PlanError: it would not run.
        """
        form = self.forms(Frame(step, order, self.sync))
        lowered = form.lowered
        if lowered.plan.rows != step.rows:
            lowered = replace(lowered, plan=replace(lowered.plan, rows=step.rows))
        contents = form.sliced.contents(self.prices.kinds, step)
        total = tariff_of(contents.seconds, step, order, self.prices, self.sync)[form.price]
        update = np.bincount(order.holder_row, weights=step.update[order.holder_stage], minlength=len(step.rows))
        seconds = ActionSeconds(total, form.comm, _inner(step, form), update.astype(np.float64))
        return Built(step, form, lowered, with_messages(lowered.plan, seconds, step.software), contents)

    def _form(self, frame: Frame) -> Form:
        return form_of(frame, slice_step(self.prices.kinds, frame.step, frame.order, self.opened))


def _inner(step: Step, form: Form) -> Floats:
    """Return the seconds a step of collectives inside compute actions, shape (rows, kinds)."""
    return np.asarray(sum(form.runs[phase] @ seconds for phase, seconds in step.inner.items()), np.float64)
