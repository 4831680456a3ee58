"""Why nothing fits: what the nearest configuration is short of."""

from __future__ import annotations

from piper_core.errors import InfeasibleError
from search.generators.best_first import BestFirst
from search.problem import Candidate, Problem
from search.result import Result

GIB = 1 << 30


class NothingFitsError(InfeasibleError):
    """None of the configurations of a space fits, or none was found."""


def nothing_found(
    problem: Problem, result: Result, generator: BestFirst, tightest: tuple[float, Candidate | None]
) -> NothingFitsError:
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
        return NothingFitsError(what + "; give it more --budget")
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
    return NothingFitsError(
        f"{what}; the nearest is {verdict}: {config} needs {need / GIB:.1f} GiB ({cause}); "
        f"use {advice}, GPUs with more memory, a shorter --seq-len, or free what --fix holds"
    )
