"""What the main command says of a finished search: its strategy files, JSON and text."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_core.arch.presets import PRESETS
from piper_core.program.strategy import Header, Strategy
from profiler import console
from profiler.spec import cluster_ids
from search.calibrate import Ranked
from search.engine import Candidate, Problem, Result, to_data
from search.price import predicted_of
from search.pricing import Pricing
from search.report.folder import BEST
from search.report.table import headline
from search.space import Space

if TYPE_CHECKING:
    from search.execute import Execution
    from search.profiled import Profiled


@dataclass
class Outcome:
    """A finished search of a cluster that was called ``cluster``; ``ranked`` where measured runs ranked it anew."""

    problem: Problem
    space: Space
    result: Result
    cluster: str
    pricing: Pricing | None = None
    ranked: Ranked | None = None
    execution: Execution | None = None

    @property
    def winner(self) -> int:
        """The candidate that the file is of: the best predicted, or the one that measurement picked."""
        return 0 if self.execution is None else self.execution.winner

    def strategy(self, rank: int) -> Strategy:
        """Return the strategy file of a candidate, with what was measured of it."""
        made = strategy_of(self.problem, self.result.candidates[rank], self.cluster, self._by(rank))
        if self.execution is None or rank != self.winner:
            return made
        return replace(made, header=replace(made.header, measured=self.execution.header()))

    def _by(self, rank: int) -> dict[str, Any] | None:
        if self.pricing is None:
            return None
        ends = {} if self.ranked is None else self.ranked.to_data(rank)
        return self.pricing.header() | {name: ends[name] for name in ("low_s", "high_s") if name in ends}

    @cached_property
    def priced(self) -> Profiled | None:
        """The winner priced by the profile, with what that knows of its doubts; None without one."""
        return None if self.pricing is None else self.pricing.price(self.strategy(self.winner))

    def to_data(self, seed: int, target: Path) -> dict[str, Any]:
        """Return the JSON form, of a search whose files are in ``target``."""
        data = to_data(self.result, seed)
        rows = data["candidates"]
        data["priced_by"] = None
        if self.pricing is not None and self.priced is not None:
            data["priced_by"] = self.pricing.header() | self.priced.to_data()
        for rank, row in enumerate(rows):
            row["recalibrated"] = None if self.ranked is None else self.ranked.to_data(rank)
        if self.execution is not None:
            data |= {"execution": self.execution.to_data(), "best": rows[self.winner]}
            for each in self.execution.measured:
                rows[each.candidate]["measured"] = each.to_data()
        rows[self.winner]["strategy_file"] = str(target / BEST)
        return data | {"headline": headline(self.result), "axes": self.space.axes()}

    def show(self, top: int, target: Path, names: list[str]) -> None:
        """Print it for people; ``names`` are the files that were written to ``target``."""
        from shutil import get_terminal_size

        from search.report.hints import hints
        from search.report.table import candidates_table, summary

        problem, result = self.problem, self.result
        print(
            f"{problem.architecture.name} on {problem.gpus} GPUs of {problem.cluster.name}, global batch "
            f"{problem.global_batch}, sequence {problem.seq_len}"
        )
        for limit in problem.architecture.limits:
            print(f"left out of the model: {limit}")
        first = headline(result)
        print(first if console.plain(sys.stdout) else f"\x1b[1m{first}\x1b[0m")
        terminal = sys.stdout is not None and sys.stdout.isatty()
        table, left_out = candidates_table(result.candidates[:top], get_terminal_size().columns if terminal else None)
        print(table)
        if left_out:
            print(f"left out of the table for want of width: {', '.join(left_out)} (--json has all)")
        for line in [*self.price_lines(), *summary(result, self.space, top)]:
            print(line)
        for line in hints(self.space):
            print(f"note: {line}")
        print(f"written: {target / BEST} (piper-search check {target / BEST}), {', '.join(names[1:])}")
        if self.execution is not None:
            print("\n".join(self.execution.lines([each.score.step_time_s for each in result.candidates])))

    def price_lines(self) -> list[str]:
        """Say by what a search was priced, where that is not the usual record of a cluster."""
        if self.pricing is not None and self.priced is not None:
            of = f"of row {self.winner + 1}, {self.priced.cost.says()}"
            return [f"priced by {self.pricing}; {of}", *(self.ranked.lines() if self.ranked is not None else [])]
        if self.problem.cluster.name != "cpu":
            return []
        problem = self.problem
        return [
            "note: costs of cpu without a profile are those of another host, and may be several times off: "
            f"piper-profile --model {problem.architecture.name} --seq-len {problem.seq_len} --ranks {problem.gpus} "
            "--budget 60s measures this one for later searches, --profile auto for this one"
        ]


def strategy_of(problem: Problem, candidate: Candidate, cluster: str, by: dict[str, Any] | None = None) -> Strategy:
    """Return the strategy file of a candidate; ``by`` says what it was priced by."""
    program, mesh, _ = problem.program(candidate.config)
    config, predicted = candidate.config, predicted_of(candidate.score, problem.cluster, by)
    header = Header(
        model=_anywhere(problem.architecture.name, PRESETS), cluster=_anywhere(cluster, cluster_ids()),
        mesh=mesh, gpus=problem.gpus, global_batch=problem.global_batch, seq_len=problem.seq_len,
        micro_batch=config.micro_batch, schedule="list" if config.order == "list" else config.schedule,
        predicted=predicted,
        versions={"piper-search": version("piper-search")},
    )  # fmt: skip
    return Strategy(header, program)


def _anywhere(name: str, known: Container[str]) -> str:
    """Return what names a model or a cluster in whatever folder it is read: the whole path, where it is one."""
    return str(Path(name).resolve()) if name not in known and Path(name).exists() else name
