"""Random orders of compute that run, of whatever quality."""

from __future__ import annotations

from random import Random

from piper_core.ir.action import Action, ActionKind, Slot
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Grid, Layout
from search.partial_bound import overlaps
from search.row_parts import stages_of_row
from search.space import Configuration

F, B, BI, BW = ActionKind.F, ActionKind.B, ActionKind.BI, ActionKind.BW


def random_grid(config: Configuration, rng: Random) -> Grid:
    """Return an order that runs: rows take turns by chance, each takes what may come next, most often a backward, and
    puts a forward and a backward into one slot where groups overlap. Backwards are whole, or cut where the schedule
    may; one that is cut leaves its second part for later."""
    family, pp, m = FAMILIES[config.schedule], config.pp, config.num_microbatches
    held = stages_of_row(config.layout, pp, config.virtual_stages)
    both = config.layout is Layout.BIDIRECTIONAL
    last, done, due = config.stages - 1, set[tuple[str, int, int]](), [list[Action]() for _ in range(pp)]
    rows: list[list[Slot]] = [[] for _ in range(pp)]
    cuts, eager = rng.random(), rng.random()

    def mine(row: int, stage: int) -> range:
        """The microbatches that pass a stage on a row: of two flows, the first half enters at row 0."""
        if not both:
            return range(m)
        return range(m // 2) if stage == row else range(m // 2, m)

    def ready(row: int) -> tuple[list[Action], list[Action]]:
        """The first forward of each stage whose input is there, and the first backward."""
        forwards, backwards = dict[int, Action](), dict[int, Action]()
        for stage, mb in [(s, i) for s in held[row] for i in mine(row, s)]:
            if ("F", stage, mb) not in done and (stage == 0 or ("F", stage - 1, mb) in done):
                forwards.setdefault(stage, Action(stage, F, mb))
            needs = ("F", stage, mb) if stage == last else ("B", stage + 1, mb)
            if ("B", stage, mb) not in done and {("F", stage, mb), needs} <= done:
                cut = family.splits_backward and rng.random() < cuts
                backwards.setdefault(stage, Action(stage, BI if cut else B, mb))
        return list(forwards.values()), list(backwards.values())

    def take(row: int, actions: Slot) -> None:
        rows[row].append(actions)
        for action in actions:
            if action.kind is BW:
                continue
            done.add(("F" if action.kind is F else "B", action.stage, action.microbatch or 0))
            if action.kind is BI:
                due[row].append(Action(action.stage, BW, action.microbatch))

    total = 2 * m * sum(map(len, held)) // (2 if both else 1)
    while len(done) < total:
        row = rng.randrange(pp)
        forwards, backwards = ready(row)
        if due[row] and rng.random() < 0.4:
            second = due[row].pop(0)
            grouped = bool(forwards) and overlaps(config) and rng.random() < 0.2
            take(row, (forwards[0], second) if grouped else (second,))
        elif forwards and backwards and overlaps(config) and rng.random() < 0.7:
            pair = rng.choice(forwards), rng.choice(backwards)
            if pair[0].microbatch != pair[1].microbatch:
                take(row, pair if rng.random() < 0.5 else pair[::-1])
        elif backwards and (not forwards or rng.random() < eager):
            take(row, (rng.choice(backwards),))
        elif forwards:
            take(row, (rng.choice(forwards),))
    for row in range(pp):
        for action in due[row]:
            rows[row].append((action,))
    return Grid(tuple(map(tuple, rows)))
