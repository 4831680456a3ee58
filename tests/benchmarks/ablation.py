"""How much slower the best becomes with each dimension held to what Megatron users take by default.

Where the best found already has what is held, it is the best found there too, and no search is made. A dimension that
never matters is suspect: those that cost less than 0.1 % in each of the first table's cases are held in those of a
second one, where they may matter, and the last line names what does in neither. What is quicker with less to choose
from says that the search missed something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TypeAlias

from piper_core.arch import preset
from piper_core.errors import InfeasibleError
from profiler.spec import load_cluster
from search.candidate import Outcome
from search.database import Database
from search.engine import Problem, search
from search.problem import Candidate
from search.space import Configuration, Space, parse_fix

BUDGET_S = 120.0
Named: TypeAlias = tuple[str, int, str, int, int]
"""Model, GPUs, cluster, global batch, sequence length."""
CASES: tuple[Named, ...] = (
    ("llama9b", 32, "p4de", 512, 4096), ("piper-9b", 32, "p4de", 512, 4096), ("llama3-70b", 64, "p4d", 512, 4096),
    ("llama3-70b", 64, "p4de", 512, 4096),
)  # fmt: skip
ELSEWHERE: tuple[Named, ...] = (
    ("llama9b", 16, "p4d", 16, 65536), ("piper-9b", 16, "p4d", 64, 4096), ("gpt2-xl", 128, "p4d", 512, 1024),
    ("llama9b", 8, "p4d", 8, 32768),
)  # fmt: skip
"""A very long sequence; experts and few microbatches; many ranks and short steps; one node and a long sequence."""
HELD = (
    "schedule=1f1b", "schedule=1f1b,interleaved_1f1b", "zero=0", "zero=0,1", "recompute=none,full",
    "recompute=none,selective,full", "micro_batch=1", "sequence_parallel=off", "cuts=even", "tp=8", "tp=1", "pp=1",
    "cp=1", "ep=1", "outer=pp", "bucket=1", "prefetch=1", "streams=own",
)  # fmt: skip
ORDER = "order of the family"
MATTERS, SAME = 1e-3, 1e-6
COLUMN = 24


class Memory(Database):
    """What was evaluated for a problem, in no file: spaces that lie in one another have configurations in common."""

    def __init__(self) -> None:
        super().__init__(Path(), {}, None)

    def begin(self) -> None:
        pass

    def record(self, outcomes: Iterable[tuple[Configuration, Outcome]]) -> None:
        self.known.update(outcomes)


class Case:
    """A model on a cluster, and the best of its whole space."""

    def __init__(self, model: str, gpus: int, cluster: str, batch: int, seq_len: int) -> None:
        self.name = f"{model} {gpus} {cluster}"
        self.problem = Problem(preset(model), load_cluster(cluster), gpus, batch, seq_len)
        self.memory = Memory()
        self.best, self.gap, self.found = self.search({})

    def search(self, fix: dict[str, tuple[str, ...]]) -> tuple[Candidate | None, float, list[Candidate]]:
        """Return the best (None where none fits), how much quicker anything can be, and all that was found.

        Raises:
            KeyboardInterrupt: at Ctrl-C.
        """
        it = self.problem
        space = Space(it.architecture, it.gpus, it.cluster.gpus_per_node, it.global_batch, it.seq_len, fix)
        try:
            found = search(it, space, budget_s=BUDGET_S, database=self.memory)
        except InfeasibleError:
            return None, 0.0, []
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        return found.best, found.family_gap, found.candidates

    def slower(self, hold: str) -> tuple[float, float]:
        """Return how much slower the best is with an axis held, as a fraction, and by how much it may be quicker."""
        assert self.best is not None
        fix = parse_fix([hold])
        if all(_text(self.best.config, axis) in values for axis, values in fix.items()):
            return 0.0, 0.0
        best, gap, _ = self.search(fix)
        return (inf if best is None else best.score.step_time_s / self.best.score.step_time_s - 1), gap

    def slower_in_order(self) -> tuple[float, float]:
        """Return the same with the orders of the families alone."""
        assert self.best is not None
        least = min(each.score.step_time_s for each in self.found if each.config.order == "family")
        return least / self.best.score.step_time_s - 1, self.gap


def _text(config: Configuration, axis: str) -> str:
    value = getattr(config, axis)
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _cell(more: float, gap: float) -> str:
    return "none fits" if more == inf else f"{more:+.2%}" + (f" (gap {gap:.1%})" if gap > SAME else "")


def compare(names: Sequence[Named], holds: Sequence[str]) -> tuple[dict[str, float], float]:
    """Print a column for each case; return how much slower each hold is where it costs most, and the least of all."""
    most: dict[str, float] = {}
    least = 0.0
    print(f"{'held to':34}" + "".join(f"{' '.join(map(str, name[:3])):>{COLUMN}}" for name in names))
    print(f"{'batch, sequence':34}" + "".join(f"{', '.join(map(str, name[3:])):>{COLUMN}}" for name in names))
    print(f"{'nothing: step s':34}", end="", flush=True)
    cases: list[Case] = []
    for name in names:
        cases.append(case := Case(*name))
        step = "none fits" if case.best is None else f"{case.best.score.step_time_s:.3f}"
        print(f"{step + (f' (gap {case.gap:.1%})' if case.gap > SAME else ''):>{COLUMN}}", end="", flush=True)
    print()
    for case in cases:
        print(f"  {case.name}: {case.best and case.best.config}", flush=True)
    for hold in holds:
        print(f"{hold:34}", end="", flush=True)
        for case in cases:
            more, gap = case.slower_in_order() if hold == ORDER else case.slower(hold)
            least, most[hold] = min(least, more), max(most.get(hold, 0.0), more)
            print(f"{_cell(more, gap):>{COLUMN}}", end="", flush=True)
        print(flush=True)
    return most, least


def main() -> int:
    """Print the tables; return 1 where holding something gave a quicker step."""
    try:
        most, least = compare(CASES, (ORDER, *HELD))
        idle = [hold for hold, more in most.items() if more < MATTERS]
        print(f"never matters here: {', '.join(idle) or 'none'}\n")
        if idle:
            found, lower = compare(ELSEWHERE, idle)
            least = min(least, lower)
            print(f"nor here: {', '.join(hold for hold, more in found.items() if more < MATTERS) or 'none'}")
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 1
    good = least >= -SAME
    print("PASS" if good else "FAIL", "nothing is quicker with less to choose from")
    return 0 if good else 1
