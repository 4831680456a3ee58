"""Small models, clusters and spaces whose configurations can all be listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from piper_core.arch.record import Architecture
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Grid, Layout
from profiler.spec import Cluster, load_cluster
from search.engine import Candidate, Problem
from search.space import Configuration, Space, parse_fix

DENSE = Architecture("small-dense", 10, 512, 1408, 8, 4, 64, 4096)
WIDE_HEAD = Architecture("wide-head", 8, 256, 704, 8, 8, 32, 65_536)
MOE = Architecture("small-moe", 8, 512, 0, 8, 4, 64, 4096, experts=4, top_k=2, expert_ffn=768)
SHARED = Architecture(
    "shared-moe", 12, 1024, 0, 8, 4, 128, 2048, experts=4, top_k=2, expert_ffn=1024, shared_ffn=512
)  # fmt: skip
MIXED = Architecture(
    "mixed-moe", 9, 512, 2816, 8, 4, 64, 2048, experts=4, top_k=2, expert_ffn=256, shared_ffn=256, dense_layers=2
)  # fmt: skip
TIED_BIAS = Architecture(
    "tied-bias", 9, 512, 2048, 8, 8, 64, 8192, gated=False, bias=True, tied=True, learned_positions=512, norm="layer",
    max_seq=512,
)  # fmt: skip
PLAIN = ("cp=1", "outer=pp", "bucket=1", "prefetch=1", "streams=own")
"""Axes that few cases need: all as they usually are."""
TIED = Architecture("tied", 8, 256, 512, 4, 4, 64, 1024, tied=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster, and its space."""

    problem: Problem
    space: Space


def case(
    architecture: Architecture,
    cluster: str,
    gpus: int,
    global_batch: int,
    seq_len: int,
    fix: Sequence[str] = (),
    *,
    memory_gib: float | None = None,
) -> Case:
    """Return a case; ``memory_gib`` stands in for the device's own memory."""
    hardware: Cluster = load_cluster(cluster)
    if memory_gib is not None:
        hardware = replace(hardware, device=replace(hardware.device, memory_bytes=memory_gib * 2**30))
    space = Space(architecture, gpus, hardware.gpus_per_node, global_batch, seq_len, parse_fix(fix))
    return Case(Problem(architecture, hardware, gpus, global_batch, seq_len), space)


def leaves(space: Space) -> Iterator[Configuration]:
    """Yield every configuration of a space: the product of its axes, filtered by its constraints."""
    for pp, tp, dp, ep, cp, outer in space.degrees():
        for schedule, v in space.schedules(pp):
            family = FAMILIES[schedule]
            stages = pp if family.layout is Layout.BIDIRECTIONAL else pp * v
            batches = [(b, m) for b, m in space.batches(dp) if m in family.microbatches(pp, v)]
            policies = [*space.recomputes(), *space.counts(stages)]
            for (b, m), recompute, sequence, cut, zero in product(
                batches, policies, space.sequence(tp, cp), space.cuts(stages), space.zeros(dp * cp, schedule)
            ):
                for fine in space.fine(dp * cp, zero, ep, family.layout):
                    yield Configuration(
                        pp, tp, dp, ep, schedule, v, zero, b, m, recompute, sequence, cut, cp, outer, *fine
                    )


def grid_of(config: Configuration) -> Grid:
    """Return the order that a configuration's family emits."""
    return get_family(config.schedule).grid(config.pp, config.num_microbatches, config.virtual_stages)


def best_by_listing(it: Case) -> list[Candidate]:
    """Return all configurations that fit, best first, by evaluating every one; of equal programs, the first, and none
    that recomputes more than another which is the same otherwise."""
    costs, found = it.problem.costs, []
    seen: set[tuple[Configuration, tuple[int, ...]]] = set()
    for config in sorted(leaves(it.space)):
        layers = costs.of(config)[0]
        program = replace(config, cuts=""), layers
        if program in seen:
            continue
        seen.add(program)
        score = it.problem.score(config)
        if score.fits == "yes":
            found.append(Candidate(config, layers, score))
    fitting: dict[Configuration, list[str]] = {}
    for each in found:
        fitting.setdefault(replace(each.config, recompute=""), []).append(each.config.recompute)
    needed = [
        each for each in found if not _needless(each.config.recompute, fitting[replace(each.config, recompute="")])
    ]
    return sorted(needed, key=lambda candidate: candidate.key)


def _needless(policy: str, fitting: Sequence[str]) -> bool:
    """Say whether less than ``policy`` fits: nothing, or fewer layers, or less than all of them."""
    less = {"none"} - {policy}
    if policy == "full":
        less = set(fitting) - {"full"}
    elif policy.isdecimal():
        less |= {other for other in fitting if other.isdecimal() and int(other) < int(policy)}
    return bool(less & set(fitting))
