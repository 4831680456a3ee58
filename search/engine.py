"""The search: propose, evaluate on all cores, keep the best, say how far from optimal it can be."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from typing import Any, TypeAlias

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.errors import DirectiveError, InfeasibleError, PlanError
from piper_core.ir.dag import training_dag
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.schedule.compile import Compiled, compile_program
from profiler.spec import Cluster
from search.bound import Bounds
from search.candidate import Score
from search.cost.roofline import RooflineCost
from search.evaluate import evaluate
from search.generators.base import Generator
from search.generators.best_first import ROUNDING, TIME, BestFirst
from search.generators.recipe import program_of
from search.space import Configuration, Space, why_empty
from search.stage_costs import StageCosts

BATCH = 8
"""Configurations evaluated between two decisions, whatever the number of workers."""
MIB, GIB = 1 << 20, 1 << 30
FINER = "not tried: other buckets, prefetches or streams of configurations that were evaluated"
PR_SET_PDEATHSIG = 1
"""``prctl`` option of Linux: the signal to get when the parent dies."""
PATIENCE = 5
"""How many times its budget a search goes on for while nothing that fits has been found. The first batch is never cut
short before that."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that was built, verified and simulated."""

    config: Configuration
    layers_per_stage: tuple[int, ...]
    score: Score

    @property
    def key(self) -> tuple[float, Configuration]:
        """Rank: step time, ties by the configuration itself."""
        return self.score.step_time_s, self.config


@dataclass(slots=True)
class Result:
    """What a search found. ``candidates`` fit, best first; ``close`` counts those too close to call. ``proof_gap`` is
    how much quicker than the best, as a fraction, anything that was not evaluated could be under the same costs;
    ``least_left_s`` is a step time that nothing of that kind beats, other buckets, prefetches and streams of what was
    evaluated aside, ``least_s`` one that those do not beat either; ``finer`` of those were evaluated."""

    candidates: list[Candidate] = field(default_factory=list)
    size: int = 0
    pruned: dict[str, int] = field(default_factory=dict)
    simulated: int = 0
    rejected: int = 0
    too_big: int = 0
    close: int = 0
    proof_gap: float = inf
    least_left_s: float = inf
    least_s: float = inf
    finer: int = 0
    wall_s: float = 0.0
    stopped: str = ""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def proved(self) -> int:
        """How many of the candidates, from the first, nothing that was not evaluated can beat."""
        return sum(each.score.step_time_s <= self.least_left_s * ROUNDING for each in self.candidates)


class Problem:
    """A model on a cluster, with what every evaluation shares."""

    def __init__(
        self, architecture: Architecture, cluster: Cluster, gpus: int, global_batch: int, seq_len: int
    ) -> None:
        self.architecture, self.cluster = architecture, cluster
        self.gpus, self.global_batch, self.seq_len = gpus, global_batch, seq_len
        self.model = model_chunks(architecture, seq_len)
        self.cost = RooflineCost(cluster)
        self.costs = StageCosts(self.model, self.cost)
        device = cluster.device
        self.bounds = Bounds(self.costs, self.cost, device.context_bytes, device.memory_bytes)
        self.base = training_dag(self.model, global_batch=global_batch)

    def bucket_mib(self, config: Configuration) -> int:
        """Return the bucket size of a configuration (0: one bucket a stage)."""
        return self.bounds.bucket_mib(config.tp, config.ep, config.bucket)

    def program(self, config: Configuration) -> tuple[Program, Mesh, tuple[int, ...]]:
        """Return the program of a configuration, its mesh, and its layers per stage."""
        counts, _ = self.costs.of(config)
        program, mesh = program_of(config, counts, self.bucket_mib(config))
        return program, mesh, counts

    def compile(self, config: Configuration) -> Compiled:
        """Return the applied DAG and the verified plan of a configuration."""
        program, mesh, _ = self.program(config)
        return compile_program(program, self.base, mesh)

    def score(self, config: Configuration) -> Score:
        """Build, verify and simulate a configuration."""
        return evaluate(
            self.compile(config), self.cost, self.cluster.device, seq_len=self.seq_len, gpus=self.gpus,
            global_batch=self.global_batch, architecture=self.architecture,
        )  # fmt: skip


def search(
    problem: Problem,
    space: Space,
    *,
    top: int = 10,
    budget_s: float = 12.0,
    workers: int | None = None,
    progress: Callable[[Result, Generator], None] | None = None,
) -> Result:
    """Search the space for the ``top`` strategies with the least step time that fit in memory.

    Ends when nothing left can be among them, after ``budget_s``, or at Ctrl-C, and returns the best so far in each
    case. What is being evaluated when the budget ends is dropped, and counts as not reached; while nothing that fits
    has been found, the budget is ``PATIENCE`` times as long.

    Raises:
        InfeasibleError: no configuration is legal, or none fits; the text says what is short by how much.
        KeyboardInterrupt: at Ctrl-C while nothing that fits has been found.
    """
    start = time.perf_counter()
    space.check()
    generator = BestFirst(space, problem.bounds, problem.cluster.device.memory_bytes)
    if not generator.size:
        raise why_empty(space)
    result = Result(size=generator.size)
    seen: dict[Configuration, Candidate] = {}
    tightest: tuple[float, Candidate | None] = (inf, None)
    floor = inf  # what an interrupt in mid-expansion may lose from the generator

    def deadline_s() -> float:
        tried = result.simulated or result.rejected
        return start + budget_s * (1 if seen else PATIENCE) if seen or tried else inf

    with _evaluator(problem, workers) as run:
        try:
            while not result.stopped:
                floor = generator.bound()
                threshold = result.candidates[top - 1].score.step_time_s if len(result.candidates) >= top else inf
                batch = generator.ask(BATCH, threshold, deadline_s())
                if generator.expired or not batch:
                    result.stopped = "budget" if generator.expired else "proved"
                    break
                for config, outcome in zip(batch, run(batch, deadline_s), strict=True):
                    if outcome is None:
                        result.stopped = "budget"
                        break
                    generator.tell(config, outcome if isinstance(outcome, Score) else None)
                    if not isinstance(outcome, Score):
                        result.rejected += 1
                        result.pruned[outcome] = result.pruned.get(outcome, 0) + 1
                        continue
                    result.simulated += 1
                    candidate = Candidate(config, problem.costs.of(config)[0], outcome)
                    if outcome.fits == "yes":
                        seen[config] = candidate
                    else:
                        result.close += outcome.fits == "close"
                        result.too_big += outcome.fits == "no"
                        tightest = min(tightest, (-outcome.margin_bytes, candidate), key=lambda pair: pair[0])
                result.candidates = sorted(seen.values(), key=lambda candidate: candidate.key)
                if progress is not None:
                    result.wall_s = time.perf_counter() - start
                    progress(result, generator)
                if time.perf_counter() > deadline_s():
                    result.stopped = "budget"
        except KeyboardInterrupt:
            result.stopped = "interrupted"
    _finish(result, generator, start, floor if result.stopped == "interrupted" else inf)
    if not result.candidates:
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        raise _nothing_found(problem, result, generator, tightest)
    return result


def _finish(result: Result, generator: BestFirst, start: float, floor: float) -> None:
    result.pruned |= {reason: n for reason, n in generator.pruned.items() if n}
    if result.too_big:
        result.pruned["memory: simulated"] = result.too_big
    if result.close:
        result.pruned["memory: too close to call"] = result.close
    if result.candidates:
        best = result.best.score.step_time_s
        result.least_left_s = min(floor, generator.bound())
        result.least_s = min(result.least_left_s, generator.rest_bound())
        result.proof_gap = max(0.0, (best - min(best, result.least_s)) / best)
        if finer := generator.rest(best) - result.finer:
            result.pruned[FINER] = finer
    counted = sum(result.pruned.values()) + len(result.candidates)
    if result.size > counted:
        result.pruned[TIME if result.stopped == "proved" else "not reached"] = result.size - counted
    result.wall_s = time.perf_counter() - start


def _nothing_found(
    problem: Problem, result: Result, generator: BestFirst, tightest: tuple[float, Candidate | None]
) -> InfeasibleError:
    """Say that nothing fits, or how far the search came, and what the nearest configuration is short of."""
    capacity = problem.cluster.device.memory_bytes
    room = f"{capacity / GIB:.1f} GiB a GPU"
    if result.stopped == "proved":
        what = f"none of {generator.size:,} configurations fits {room}"
    else:
        left = result.pruned.get("not reached", 0)
        what = f"{result.stopped} after {result.wall_s:.0f} s, nothing found that fits {room}"
        what += f" and {left:,} of {generator.size:,} configurations not reached"
    need, config = generator.nearest
    if config is None and tightest[1] is None:
        return InfeasibleError(what + "; give it more --budget")
    if tightest[1] is not None and -tightest[1].score.margin_bytes + capacity <= need * 1.5:
        score, config = tightest[1].score, tightest[1].config
        row = max(range(len(score.memory)), key=lambda r: score.peak_memory_bytes[r])
        need = score.peak_memory_bytes[row]
        parts = sorted(score.memory[row].items(), key=lambda item: -item[1])[:3]
        cause = f"row {row} holds " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    elif config is not None and config.cuts:
        cause = f"at least; parameters, gradients and optimizer {max(problem.bounds.static_bytes(config)) / GIB:.1f}"
    else:
        cause = "at least, with all state sharded over dp and pp"
    short = need - capacity
    verdict = f"{short / GIB:.1f} GiB short" if short > 0 else "too close to call"
    advice = "more GPUs" if result.stopped == "proved" else "more --budget or more GPUs"
    return InfeasibleError(
        f"{what}; the nearest is {verdict}: {config} needs {need / GIB:.1f} GiB ({cause}); "
        f"use {advice}, GPUs with more memory, a shorter --seq-len, or free what --fix holds"
    )


_PROBLEM: Problem | None = None


def _score(config: Configuration) -> Score | str:
    """Evaluate in a worker; a configuration that does not apply or run comes back as its reason."""
    assert _PROBLEM is not None
    try:
        return _PROBLEM.score(config)
    except (DirectiveError, PlanError, InfeasibleError) as error:
        return f"rejected: {error}"


def _start_worker() -> None:
    """Leave Ctrl-C to the main process, and end with it however it ends (on Linux, where the kernel sees to that)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_Outcomes: TypeAlias = Iterator[Score | str | None]
_Run: TypeAlias = Callable[[Sequence[Configuration], Callable[[], float]], _Outcomes]


@contextmanager
def _evaluator(problem: Problem, workers: int | None) -> Iterator[_Run]:
    """Yield a function that scores a batch in order, on ``workers`` forked processes (in this one where that is 1).

    Once the clock passes the deadline, which may change on the way, what is left of the batch comes back as None. An
    evaluation in this process is not cut short.
    """
    global _PROBLEM
    _PROBLEM = problem
    count = workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else workers or 1

    def left(deadline_s: Callable[[], float]) -> float:
        return deadline_s() - time.perf_counter()

    def here(batch: Sequence[Configuration], deadline_s: Callable[[], float]) -> _Outcomes:
        for config in batch:
            yield _score(config) if left(deadline_s) > 0 else None

    if count <= 1:
        yield here
        return
    pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_start_worker)
    running: list[Future[Score | str]] = []

    def apart(batch: Sequence[Configuration], deadline_s: Callable[[], float]) -> _Outcomes:
        running[:] = [pool.submit(_score, config) for config in batch]
        for future in running:
            seconds = left(deadline_s)
            try:
                yield future.result(None if seconds == inf else max(0.0, seconds))
            except TimeoutError:
                yield None

    try:
        yield apart
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in running):  # nobody waits for what is still being evaluated
            for process in processes:
                process.terminate()


def to_data(result: Result, seed: int) -> dict[str, Any]:
    """Return the JSON form of a result."""
    rows = [candidate_data(candidate, i) for i, candidate in enumerate(result.candidates)]
    return {
        "best": rows[0],
        "candidates": rows,
        "pareto": [rows[i]["id"] for i in pareto(result.candidates)],
        "space": {"size": result.size, "pruned": result.pruned, "simulated": result.simulated},
        "proof_gap": result.proof_gap,
        "proved": result.proved,
        "stopped": result.stopped,
        "wall_s": result.wall_s,
        "seed": seed,
    }


def candidate_data(candidate: Candidate, rank: int) -> dict[str, Any]:
    """Return the JSON form of one candidate."""
    config = candidate.config
    return {
        "id": rank,
        "degrees": {
            "pp": config.pp, "tp": config.tp, "dp": config.dp, "ep": config.ep, "cp": config.cp,
            "virtual_stages": config.virtual_stages,
        },
        "zero_stage": config.zero,
        "schedule": config.schedule,
        "micro_batch": config.micro_batch,
        "num_microbatches": config.num_microbatches,
        "recompute": config.recompute,
        "sequence_parallel": config.sequence_parallel,
        "cuts": config.cuts,
        "outer": config.outer,
        "bucket": config.bucket,
        "prefetch": config.prefetch,
        "streams": config.streams,
        "layers_per_stage": list(candidate.layers_per_stage),
        "predicted": candidate.score.to_data(),
        "measured": None,
        "strategy_file": None,
    }  # fmt: skip


def pareto(candidates: Sequence[Candidate]) -> list[int]:
    """Return the indices of candidates that no other beats in both step time and memory, quickest first."""
    front: list[int] = []
    least = inf
    for i, candidate in enumerate(candidates):
        if candidate.score.worst_row_bytes < least:
            front.append(i)
            least = candidate.score.worst_row_bytes
    return front
