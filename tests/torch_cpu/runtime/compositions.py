"""Compositions of all that directives allow on eight ranks and four layers, and a sample that covers all pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import TypeVar

from piper_core.names import Sync
from piper_core.runtime.optimizer import SGD, AdamW, Clip, Optimizer
from piper_core.runtime.program import Training
from piper_core.runtime.slices import Reduction
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from tests.torch_cpu.runtime.cases import BIASED, LLAMA, MIXTURE, TIED, Case

Value = TypeVar("Value")
Pick = Callable[[Sequence[Value]], Value]
RANKS = 8


@dataclass(frozen=True, slots=True)
class Composition:
    case: Case
    training: Training

    def __str__(self) -> str:
        return f"{self.case} {type(self.training.optimizer).__name__} {sorted(features(self))}"


def compose(pick: Pick[object]) -> Composition:
    """Return the composition that ``pick`` chooses, one value of several at a time."""

    def of(values: Sequence[Value]) -> Value:
        return pick(values)  # type: ignore[return-value]  # one of them

    schedule = of(sorted(FAMILIES))
    layout = FAMILIES[schedule].layout
    v = 2 if layout is Layout.V or schedule == "interleaved_1f1b" else 1
    pp = (
        2 if v == 2 or layout is Layout.BIDIRECTIONAL else of((1, 2, 2, 4) if schedule in ("1f1b", "gpipe") else (2, 4))
    )
    tied = () if layout is Layout.BIDIRECTIONAL else (TIED,)  # a tied stage on two rows is refused
    architecture = of((LLAMA, MIXTURE, BIASED, *tied))
    left = RANKS // pp
    dp = of([n for n in (1, 2, 2, 4) if n <= left])
    tp = of([n for n in (1, 2) if n * dp <= left])
    cp = of([n for n in (1, 2) if n * dp * tp <= left])
    ep = of([n for n in (1, 2, 4) if architecture.experts and dp % n == 0] or [1])
    zero = of(range(2 if layout is Layout.BIDIRECTIONAL else 4)) if dp * cp > 1 else 0
    sync = of((Sync.GLOBAL_NORM, Sync.GLOBAL_NORM, Sync.NONE))
    overlaps = schedule in ("dualpipev", "dualpipe")
    m = of((4, 6) if overlaps else (2, 3, 4))
    case = Case(
        architecture, schedule, pp, v, m, dp, cp, tp, ep, zero,
        sequence=of((False, True)) if tp > 1 else False,
        method=of(("ring", "all_to_all")) if cp > 1 else "ring",
        recompute=of(("none", "full", "selective")),
        buckets=of((True, True, False)),
        prefetch=of((0, 1, 2)),
        sync=sync,
        cuts=of(((), (1,), (3,))) if pp * v == 2 and layout is not Layout.BIDIRECTIONAL else (),
        apart=False if overlaps else of((False, True)),
    )  # fmt: skip
    optimizers: tuple[Optimizer, ...] = (SGD(0.1, 0.9, 0.01), AdamW(0.01))
    training = Training(
        of(optimizers),
        Clip(0.5) if sync is Sync.GLOBAL_NORM and of((True, False)) else None,
        of((Reduction.TOKEN, Reduction.MICROBATCH)),
    )
    return Composition(case, training)


def features(each: Composition) -> frozenset[str]:
    """Return what a composition has of what can be combined."""
    case, training = each.case, each.training
    found = {
        case.schedule, f"ZeRO-{case.zero}" if case.zero else "",
        "experts" if case.architecture.experts else "tied" if case.architecture.tied else "",
        "dp" if case.dp > case.ep else "", "ep" if case.ep > 1 else "",
        "" if case.tp == 1 else "sequence" if case.sequence else "tensor",
        f"context {case.method}" if case.cp > 1 else "",
        f"recompute {case.recompute}" if case.recompute != "none" else "",
        "BI and BW apart" if case.apart else "", "uneven stages" if case.cuts else "",
        "no barrier" if case.sync is Sync.NONE else "",
        type(training.optimizer).__name__, "clip" if training.clip else "", training.reduction,
    }  # fmt: skip
    return frozenset(found - {""})


def sample(seed: int, pool: int, captures: int) -> list[Composition]:
    """Return compositions of which every pair of features that ``pool`` random ones have is in one at least.

    Of models and divisions, each of which is captured, there are as many as ``captures``, besides what pairs need.
    """
    rng = Random(seed)
    drawn = [compose(rng.choice) for _ in range(pool)]
    pairs = {id(each): set(combinations(sorted(features(each)), 2)) for each in drawn}
    missing = set().union(*pairs.values())
    chosen: list[Composition] = []
    seen: set[object] = set()
    while missing:
        best = max(drawn, key=lambda each: _worth(each.case, len(pairs[id(each)] & missing), seen, captures))
        chosen.append(best)
        seen.add(source_of(best.case))
        missing = missing - pairs[id(best)]
    return chosen


def _worth(case: Case, new: int, seen: set[object], captures: int) -> float:
    """Return the new pairs that a case brings for its price; what it needs captured is the most of that."""
    price = 1.0 + case.ranks / 8 + (source_of(case) not in seen) * (3.0 if len(seen) < captures else 8.0)
    return new / price


def source_of(case: Case) -> object:
    """Return what a capture depends on."""
    method = case.method if case.cp > 1 else ""
    return case.architecture, case.tp, case.sequence, case.ep, case.cp, method, case.micro_batch
