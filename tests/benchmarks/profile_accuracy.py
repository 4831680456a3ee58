"""Predictions by a profile against measured steps on this machine's cores: the whole loop, from profile to winner.

Takes a profile of each tiny model, predicts strategies on one and two ranks, runs them all by the runtime on gloo
processes, turn about, and says how far off predictions are: as they come, recalibrated by five runs, beside the
machine's own noise. ``PIPER_PRIORITY=1`` lets runs come before other programs (needs root): for a busy machine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

SEQ, ROUNDS, LEARN = 128, 25, 5
LIMITS = {"before": 0.10, "after": 0.05, "tau": 0.8, "winner": 0.05}
"""Limits of the mean absolute error before and after recalibration, Kendall's tau, and the winner's loss."""
FAMILIES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "zbv", "v_half", "v_min", "dualpipev", "dualpipe")
STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "tiny-llama": [
        {"pp": 1}, {"pp": 1, "micro_batch": 2, "num_microbatches": 2}, {"pp": 1, "recompute": "full"},
        {"pp": 1, "recompute": "selective"},
        *({"pp": 2, "schedule": name} for name in FAMILIES),
        {"pp": 2, "micro_batch": 2, "num_microbatches": 2}, {"pp": 2, "recompute": "full"},
        *({"dp": 2, "zero": zero, "num_microbatches": 2} for zero in range(4)),
        {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "micro_batch": 2, "num_microbatches": 2},
    ],
    "tiny-moe": [
        {"pp": 1}, {"pp": 1, "micro_batch": 2, "num_microbatches": 2},
        *({"pp": 2, "schedule": name} for name in ("1f1b", "zbv", "dualpipev")),
        *({"dp": 2, "zero": zero, "num_microbatches": 2} for zero in (0, 1, 3)),
        {"dp": 2, "ep": 2, "num_microbatches": 2}, {"dp": 2, "ep": 2, "zero": 1, "num_microbatches": 2},
        {"tp": 2},
    ],
}  # fmt: skip
"""Degrees of each strategy; each step trains four sequences."""


@dataclass(frozen=True)
class Row:
    """One strategy: predicted with its ends, recalibrated with its interval, measured with its noise."""

    name: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    noise: float
    disturbed: int
    run: Any
    times_s: tuple[float, ...]


def main() -> int:
    """Print the table; return 1 when a limit is broken."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    priority = bool(os.environ.get("PIPER_PRIORITY"))
    kept = True
    with TemporaryDirectory(prefix="piper-profiles-") as folder:
        for model, chosen in STRATEGIES.items():
            kept &= report(model, measured(model, chosen, Path(folder), priority))
    return 0 if kept else 1


def measured(model: str, chosen: list[dict[str, Any]], store: Path, priority: bool) -> list[Row]:
    """Take a profile, predict, run."""
    from piper_core.arch.presets import preset
    from profiler.cli import main as profile_main
    from profiler.measure.steps import Trial, measure_steps
    from profiler.record import Sample
    from profiler.spec import load_cluster
    from profiler.store import load, profiles
    from search.history import keep_run
    from search.predict import predict
    from search.profiled import by_profile, run_of
    from search.request import Request

    architecture, cluster = preset(model), load_cluster("cpu")
    began = perf_counter()
    options = ["--model", model, "--seq-len", str(SEQ), "--ranks", "2", "--micro-batch", "1,2", "--budget", "150s"]
    status = profile_main([*options, "--store", str(store), *(["--priority"] if priority else [])])
    if status:
        sys.exit(status)
    took = perf_counter() - began
    (path,) = [each for each in profiles(store) if each.name.startswith(model)]
    profile = load(path)
    found, trials = [], []
    for options_ in chosen:
        given = {"micro_batch": 1, "num_microbatches": 4, **options_}
        guess = predict(Request(architecture, cluster, seq_len=SEQ, **given))
        found.append(by_profile(guess, profile, architecture, cluster))
        trials.append(Trial(named(options_), guess.compiled, given["micro_batch"], SEQ))
    print(f"{model}: profile in {took:.0f} s, {len(trials)} strategies", flush=True)
    rows: list[Row] = []
    paces: list[float] = []
    for trial, each, bursts in zip(
        trials, found, measure_steps(architecture, trials, ROUNDS, priority=priority), strict=True
    ):
        quiet = [b.seconds for b in bursts if not b.disturbed]
        times = quiet if len(quiet) >= 5 else [b.seconds for b in bursts]
        sample = Sample(tuple(times), len(bursts) - len(times))
        paces += [b.pace_s for b in bursts]
        score = each.found.score
        keep_run(path, profile, trial.name, program_digest(each.found.strategy.program), sample, score)
        rows.append(
            Row(
                trial.name, score.step_time_s, each.low_s, each.high_s, sample.median_s, sample.spread,
                sum(b.disturbed for b in bursts), run_of(trial.name, trial.name, "now", sample, score),
                tuple(b.seconds for b in bursts),
            )
        )  # fmt: skip
    print(f"the fixed work of a core's pace took {median(paces) * 1e3:.2f} ms beside the steps, "
          f"{profile.pace_s * 1e3:.2f} ms beside the profile")  # fmt: skip
    return rows


def named(options: dict[str, Any]) -> str:
    """Return a strategy's short text."""
    words = {"num_microbatches": "m", "micro_batch": "b", "sequence_parallel": "sp", "schedule": "", "recompute": ""}
    return " ".join(f"{words.get(k, k)}{v if v is not True else ''}" for k, v in options.items())


def program_digest(program: Any) -> str:
    """Return a hash of a program's directives."""
    return sha256(repr(program).encode()).hexdigest()[:12]


def raced(rows: list[Row]) -> str:
    """Race the strategies on the times they took, best guess first, and say how that went."""
    from profiler.race import Rules, race

    names = [row.name for row in sorted(rows, key=lambda row: row.predicted_s)]
    times = {row.name: iter(row.times_s) for row in rows}
    found = race(names, lambda alive: {name: next(times[name]) for name in alive}, Rules(rounds=ROUNDS))
    best = min(rows, key=lambda row: row.measured_s)
    winner = next(row for row in rows if row.name == found.winner)
    return (
        f"race: {found.winner} after {found.runs} of {len(rows) * ROUNDS} runs ({found.ended}), "
        f"{winner.measured_s / best.measured_s - 1:.1%} from the best of all runs, {best.name}"
    )


def report(model: str, rows: list[Row]) -> bool:
    """Print one model's table; return whether it kept the limits."""
    from profiler.residual import Residual

    learnt = Residual.of([rows[i].run for i in spread_out(rows)])
    print(f"{'strategy':32}{'measured':>10}{'noise':>7}{'predicted':>11}{'low':>8}{'high':>8}{'error':>8}"
          f"{'after':>9}{'90 % interval':>18}{'error':>8}")  # fmt: skip
    before, after, inside = [], [], 0
    for i, row in enumerate(rows):
        seconds, low, high = learnt.apply(row.predicted_s, row.run.features)
        first, second = row.predicted_s / row.measured_s - 1, seconds / row.measured_s - 1
        before.append(first)
        if i not in spread_out(rows):
            after.append(second)
            inside += low <= row.measured_s <= high
        print(f"{row.name:32}{row.measured_s * 1e3:10.2f}{row.noise:7.1%}{row.predicted_s * 1e3:11.2f}"
              f"{row.low_s * 1e3:8.2f}{row.high_s * 1e3:8.2f}{first:8.1%}{seconds * 1e3:9.2f}"
              f"{low * 1e3:9.2f}{high * 1e3:9.2f}{second:8.1%}{' *' if i in spread_out(rows) else ''}")  # fmt: skip
    tau, noise = kendall(rows), median(row.noise for row in rows)
    best = min(row.measured_s for row in rows)
    loss = min(rows, key=lambda row: row.predicted_s).measured_s / best - 1
    figures = {
        "before": mean(map(abs, before)), "after": mean(map(abs, after)), "tau": tau, "winner": loss,
    }  # fmt: skip
    print(f"{model}: mean error {figures['before']:.1%} as predicted, {figures['after']:.1%} after {LEARN} runs (*), "
          f"{inside} of {len(after)} others inside their 90 % intervals; Kendall tau {tau:.2f}; the predicted "
          f"winner is {loss:.1%} from the best measured; noise of steps (quartiles) {noise:.1%}; "
          f"{sum(r.disturbed for r in rows)} of {len(rows) * ROUNDS} bursts disturbed")  # fmt: skip
    print(raced(rows))
    kept = figures["tau"] >= LIMITS["tau"] and all(figures[n] <= LIMITS[n] for n in ("before", "after", "winner"))
    print(f"limits: {LIMITS}: {'kept' if kept else 'BROKEN'}\n", flush=True)
    return kept


def spread_out(rows: list[Row]) -> list[int]:
    """Return the strategies to learn from: evenly spread in the order they are listed in."""
    return [round(i * (len(rows) - 1) / (LEARN - 1)) for i in range(LEARN)]


def kendall(rows: list[Row]) -> float:
    """Return Kendall's tau of predicted and measured, ties aside."""
    signs = [(a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) for a, b in combinations(rows, 2)]
    return mean([(s > 0) - (s < 0) for s in signs])
