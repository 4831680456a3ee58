"""The compute of a plan's row, back in the words of an order directive."""

from __future__ import annotations

from piper_core.ir.action import COMPUTE_KINDS, Action, Slot
from piper_core.schedule.plan import Plan


def compute_slots(plan: Plan, row: int) -> tuple[Slot, ...]:
    """Return a row's compute as an order directive says it: parts of one action joined, those that take turns in
    one slot."""
    slots: list[list[Action]] = []
    slot_of: dict[Action, int] = {}
    for part in plan.actions(plan.compute_stream(row)):
        if part.kind not in COMPUTE_KINDS:
            continue
        whole = Action(part.stage, part.kind, part.microbatch)
        first = slot_of.setdefault(whole, len(slots))
        if first == len(slots):
            slots.append([whole])
        elif first < len(slots) - 1:  # the slots since its last part overlap with it
            slots[first:] = [[action for slot in slots[first:] for action in slot]]
            slot_of.update(dict.fromkeys(slots[first], first))
    return tuple(map(tuple, slots))
