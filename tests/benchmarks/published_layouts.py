"""The layouts that people published for a model and a cluster, priced like everything else, against what the search
finds for the same model, cluster, batch and sequence: the winner must be at least as good as each that fits.

Every layout is given the kernels that the search prices, whatever it ran with. The published step times are not looked
at: this is a check of the search, not of the costs. ``gap`` is the most by which another configuration with the order
of its family may be quicker than the winner. All of these layouts ran; those that our memory model does not say to fit
(often too close to call, so the search may not choose them) are compared too, under ``others``, but fail nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

from piper_core.errors import PiperError
from search.cost.software import OWN
from search.engine import Problem, search
from search.predict import predict
from search.request import Kernels, Request
from search.space import Space
from search.validation.facts import STEPS, load_facts
from search.validation.rows import request_of

BUDGET_S = 20.0
MOST_GPUS = 256
"""Larger clusters take longer than a benchmark may."""
SAME = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Group:
    """The layouts of one problem: what the best of those that fit takes, of the others (None: there is none), and of
    the search (None: nothing fits)."""

    layouts: int
    fit: int
    best_s: float | None
    others_s: float | None
    ours_s: float | None
    gap: float
    wall_s: float

    @property
    def gain(self) -> float | None:
        """How much longer the best layout that fits takes than the search's winner."""
        return self._over(self.best_s)

    @property
    def others(self) -> float | None:
        """The same of the layouts that are not said to fit."""
        return self._over(self.others_s)

    def _over(self, seconds: float | None) -> float | None:
        return None if seconds is None or self.ours_s is None else seconds / self.ours_s - 1

    @property
    def good(self) -> bool:
        """Whether no layout is better."""
        return self.best_s is None or (self.ours_s is not None and self.ours_s <= self.best_s * SAME)


def published(most_gpus: int = MOST_GPUS) -> Iterator[Request]:
    """Yield the layouts that can be said, with the search's own kernels and software."""
    for row in load_facts(STEPS):
        try:
            request = replace(request_of(row), kernels=Kernels(), software=OWN)
        except PiperError:
            continue
        if (request.gpus or 0) <= most_gpus:
            yield request


def problem_of(request: Request) -> tuple[object, ...]:
    return request.architecture.name, request.cluster.name, request.gpus, request.global_batch, request.seq_len


def compare(layouts: list[Request], budget_s: float = BUDGET_S) -> Group:
    """Price the layouts of one problem, and search it.

    Raises:
        KeyboardInterrupt: at Ctrl-C.
    """
    times: list[float] = []
    others: list[float] = []
    for request in layouts:
        try:
            score = predict(request, proved=False).score
        except PiperError:
            continue
        (times if score.fits == "yes" else others).append(score.step_time_s)
    first = layouts[0]
    assert first.gpus is not None and first.global_batch is not None  # noqa: PT018  # every row has both
    problem = Problem(first.architecture, first.cluster, first.gpus, first.global_batch, first.seq_len)
    space = Space(first.architecture, first.gpus, first.cluster.gpus_per_node, first.global_batch, first.seq_len, {})
    ours, gap, wall_s = None, 0.0, 0.0
    try:
        found = search(problem, space, top=1, budget_s=budget_s)
    except PiperError:
        pass
    else:
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        ours, gap, wall_s = found.best.score.step_time_s, found.family_gap, found.wall_s
    least, other = min(times, default=None), min(others, default=None)
    return Group(len(layouts), len(times), least, other, ours, gap, wall_s)


def line(key: tuple[object, ...], group: Group) -> str:
    """Return a row of the table."""
    name, cluster, gpus, batch, seq_len = map(str, key)
    seconds = ["" if each is None else f"{each:.3f}" for each in (group.best_s, group.ours_s)]
    more = ["" if each is None else f"{each:+.1%}" for each in (group.gain, group.others)]
    return (f"{name[:16]:16} {cluster[:28]:28}{gpus:>5}{batch:>6}{seq_len:>7}{f'{group.fit}/{group.layouts}':>8}"
            f"{seconds[0]:>10}{seconds[1]:>10}{more[0]:>8}{more[1]:>8}{group.gap:6.1%}{group.wall_s:7.1f}"
            + ("" if group.good else "  FAIL"))  # fmt: skip


def main() -> int:
    """Print a row of each problem: the best published layout, the winner, and the gain."""
    requests = sorted(published(), key=lambda each: str(problem_of(each)))
    print(f"{'model':16} {'cluster':28}{'GPUs':>5}{'batch':>6}{'seq':>7}{'fit':>8}{'best s':>10}{'search s':>10}"
          f"{'gain':>8}{'others':>8}{'gap':>6}{'took s':>7}", flush=True)  # fmt: skip
    groups = []
    try:
        for key, layouts in groupby(requests, key=problem_of):
            groups.append(compare(list(layouts)))
            print(line(key, groups[-1]), flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    gains = [group.gain for group in groups if group.gain is not None]
    quicker = [-group.others for group in groups if group.others is not None and group.others < 1 - SAME]
    good = all(group.good for group in groups)
    if gains:
        print(f"{len(gains)} problems with {sum(group.fit for group in groups)} layouts that fit of "
              f"{sum(group.layouts for group in groups)}: gain {min(gains):.1%} to {max(gains):.1%}, "
              f"median {median(gains):.1%}; {sum(group.gap == 0 for group in groups)} without a gap")  # fmt: skip
    if quicker:
        print(f"in {len(quicker)} problems a layout that is not said to fit is quicker, by {max(quicker):.1%} at most, "
              f"{median(quicker):.1%} in the median")  # fmt: skip
    print("PASS" if good else "FAIL", "the winner is at least as good as every published layout that fits")
    return 0 if good else 1
