"""Moves from one strategy to strategies near it: neighbours of its directives, and of the fields behind them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from piper_core.directives import Directive, Order, Place, RecomputeDirective, Replicate, Split, Stage
from piper_core.errors import DirectiveError, PiperError
from piper_core.ir.dag import Dag
from piper_core.ir.filter import Filter
from piper_core.names import Recompute
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout, rows_of_stage
from search.slots import compute_slots

EVERYTHING = Filter(())
HAND = "custom"
"""The schedule of a strategy whose order was moved by hand, or by a refinement."""


@dataclass(frozen=True, slots=True)
class Move:
    """A strategy near another, and what was done in words."""

    strategy: Strategy
    words: str


def coarse_moves(strategy: Strategy, compiled: Compiled, base: Dag) -> Iterator[Move]:
    """Yield other ZeRO stages, kinds of tensor sharding, recompute, microbatches and schedules."""
    yield from (move for fine, move in _neighbours(strategy, compiled, base) if not fine)
    yield from _recompute(strategy, compiled)
    yield from _schedules(strategy, compiled)


def fine_moves(strategy: Strategy, compiled: Compiled, base: Dag) -> Iterator[Move]:
    """Yield other cuts, buckets and prefetches."""
    yield from (move for fine, move in _neighbours(strategy, compiled, base) if fine)


def _neighbours(strategy: Strategy, compiled: Compiled, base: Dag) -> Iterator[tuple[bool, Move]]:
    """Yield the neighbours of all directives but orders and placements, with whether they change little."""
    program, mesh = strategy.program, strategy.header.world
    for i, directive in enumerate(program.directives):
        if isinstance(directive, Order | Place):
            continue
        try:
            met = program.before(type(directive), base, mesh)
        except DirectiveError:
            continue
        for near in directive.neighbours(met, mesh):
            words = f"{_short(directive)} became {_short(near)}"
            if isinstance(near, Split) and isinstance(directive, Split):
                yield from ((False, move) for move in _other_split(strategy, compiled, i, directive, near, words))
            else:
                yield _is_fine(directive, near), Move(_with(strategy, i, near), words)


def _is_fine(old: Directive[Any], new: Directive[Any]) -> bool:
    def zero(each: Replicate) -> tuple[bool, ...]:
        return each.shard_optimizer, each.shard_grads, each.shard_params

    same_zero = isinstance(old, Replicate) and isinstance(new, Replicate) and zero(old) == zero(new)
    return isinstance(old, Stage) or same_zero


def order_moves(strategy: Strategy, base: Dag, rng: random.Random) -> Iterator[Move]:
    """Yield neighbours of the orders (swaps of consecutive slots, a BW moved back), in an order drawn from ``rng``."""
    program, mesh = strategy.program, strategy.header.world
    total = [(i, each) for i, each in enumerate(program.directives) if isinstance(each, Order) and each.actions]
    if not total:
        return
    met = program.before(Order, base, mesh)
    found = [(i, row, at, jump) for i, order in total for row in range(len(order.actions))
             for at, jump in _swaps(order, row)]  # fmt: skip
    rng.shuffle(found)
    for i, row, at, jump in found:
        order = program.directives[i]
        assert isinstance(order, Order)
        near = _swapped(order, row, at, jump)
        if near.legal(met, mesh):
            number, slots = order.actions[row]
            moved = " ".join(map(str, slots[at]))
            words = f"row {number}: {moved} moved {jump} later"
            header = replace(strategy.header, schedule=HAND if strategy.header.schedule else None)
            yield Move(replace(_with(strategy, i, near), header=header), words)


def _swaps(order: Order, row: int) -> Iterator[tuple[int, int]]:
    """Yield (position, places to move back) as ``Order.neighbours`` does."""
    _, slots = order.actions[row]
    for at in range(len(slots) - 1):
        for jump in (1, 2, 4, 8) if slots[at][0].kind.value == "BW" else (1,):
            if at + jump < len(slots):
                yield at, jump


def _swapped(order: Order, row: int, at: int, jump: int) -> Order:
    number, slots = order.actions[row]
    moved = (*slots[:at], *slots[at + 1 : at + 1 + jump], slots[at], *slots[at + 1 + jump :])
    return Order(actions=(*order.actions[:row], (number, moved), *order.actions[row + 1 :]))


def _with(strategy: Strategy, i: int, directive: Directive[Any]) -> Strategy:
    directives = strategy.program.directives
    return replace(strategy, program=Program((*directives[:i], directive, *directives[i + 1 :])))


def _other_split(strategy: Strategy, compiled: Compiled, i: int, old: Split, new: Split, words: str) -> Iterator[Move]:
    """Yield the strategy with other microbatches: its family's order is emitted anew, a partial order stays."""
    near = _with(strategy, i, new)
    if strategy.header.micro_batch is not None:
        share = strategy.header.micro_batch * old.num_microbatches
        if share % new.num_microbatches:
            return
        near = replace(near, header=replace(near.header, micro_batch=share // new.num_microbatches))
    total = [each for each in strategy.program.directives if isinstance(each, Order) and each.actions]
    if not total:
        yield Move(near, words)
    elif (schedule := strategy.header.schedule) is not None and schedule in FAMILIES:
        made = _ordered(near, compiled, schedule, new.num_microbatches)
        if made is not None:
            yield Move(made, words)


def _recompute(strategy: Strategy, compiled: Compiled) -> Iterator[Move]:
    """Yield recompute added for everything or one stage, and each recompute directive left out."""
    program = strategy.program
    present = [each for each in program.directives if isinstance(each, RecomputeDirective)]
    for directive in present:
        rest = tuple(each for each in program.directives if each is not directive)
        yield Move(replace(strategy, program=Program(rest)), f"{_short(directive)} left out")
    if present:
        return
    stages = compiled.plan.stages
    filters = [EVERYTHING, *(Filter((("PP", stage),)) for stage in range(stages) if stages > 1)]
    for policy in (Recompute.SELECTIVE, Recompute.FULL):
        for filter_ in filters:
            added = RecomputeDirective(filter_, policy)
            at = next((i for i, each in enumerate(program.directives) if isinstance(each, Order)),
                      len(program.directives))  # fmt: skip
            directives = (*program.directives[:at], added, *program.directives[at:])
            yield Move(replace(strategy, program=Program(directives)), f"{_short(added)} added")


def _schedules(strategy: Strategy, compiled: Compiled) -> Iterator[Move]:
    """Yield the orders of other families on the same placement."""
    for name in FAMILIES:
        if name != strategy.header.schedule:
            made = _ordered(strategy, compiled, name, compiled.plan.microbatches)
            if made is not None:
                yield Move(made, f"schedule {strategy.header.schedule or 'of the file'} became {name}")


def _ordered(strategy: Strategy, compiled: Compiled, name: str, m: int) -> Strategy | None:
    """Return a strategy in the order of a family; None where that does not fit its rows, stages or microbatches."""
    family, plan = FAMILIES[name], compiled.plan
    p = len(plan.rows)
    if p == 1 or family.layout is Layout.BIDIRECTIONAL or plan.stages % p:
        return None
    v = plan.stages // p
    if p not in family.degrees() or v not in family.virtual_stages(p) or m not in family.microbatches(p, v):
        return None
    if tuple(held for (held,) in rows_of_stage(family.layout, p, v)) != _held(compiled):
        return None
    try:
        order = Order(actions=tuple(enumerate(family.grid(p, m, v).rows)))
    except PiperError:
        return None
    rest = tuple(each for each in strategy.program.directives if not isinstance(each, Order))
    return replace(strategy, header=replace(strategy.header, schedule=name), program=Program((*rest, order)))


def _held(compiled: Compiled) -> tuple[int, ...]:
    """Return the row of each stage, -1 where it lies on several."""
    plan = compiled.plan
    found: list[set[int]] = [set() for _ in range(plan.stages)]
    for row in range(len(plan.rows)):
        for slot in compute_slots(plan, row):
            for action in slot:
                found[action.stage].add(row)
    return tuple(rows.pop() if len(rows) == 1 else -1 for rows in found)


def _short(directive: Directive[Any]) -> str:
    data = directive.to_data()
    fields = ", ".join(f"{name} {value}" for name, value in data.items() if name != "op" and value not in ({}, []))
    return f"{data['op']}({fields if len(fields) <= 90 else fields[:87] + '...'})"
