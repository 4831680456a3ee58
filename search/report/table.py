"""What a search prints for people: who won and why, the ten best, how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from search.engine import Candidate, Result, pareto
from search.space import Space

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
_WORDS = {"proved": "nothing left can be among them", "budget": "time budget spent", "interrupted": "interrupted"}


def headline(result: Result) -> str:
    """Return one line that says what won, and why the runner-up lost."""
    best = result.best
    text = f"{_describe(best)} wins: {best.score.step_time_s:.3f} s a step, {best.score.mfu:.1%} MFU"
    if len(result.candidates) == 1:
        return text + "; nothing else that was evaluated fits."
    other = result.candidates[1]
    slower = other.score.step_time_s / best.score.step_time_s - 1
    if slower < 1e-6:
        return text + f"; {_describe(other)} takes as long and stands second by its name alone."
    return text + f"; the runner-up, {_describe(other)}, is {slower:.1%} slower: {_why(best, other)}."


def _describe(candidate: Candidate) -> str:
    config = candidate.config
    sizes = {"PP": config.pp, "TP": config.tp, "DP": config.dp, "EP": config.ep}
    degrees = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    schedule = config.schedule if config.pp > 1 else "gradient accumulation"
    virtual = f" v{config.virtual_stages}" if config.virtual_stages > 1 and config.pp > 1 else ""
    return " ".join([*degrees, f"{schedule}{virtual}", f"ZeRO-{config.zero}", f"microbatch {config.micro_batch}"])


def _why(best: Candidate, other: Candidate) -> str:
    """Name the causes that cost the runner-up most against the best, in seconds of a step."""
    a, b = best.score.breakdown, other.score.breakdown
    differences = {name: b.get(name, 0.0) - a.get(name, 0.0) for name in {*a, *b}}
    worst = sorted(differences.items(), key=lambda item: (-item[1], item[0]))[:2]
    words = [f"{seconds:+.3f} s {name.replace('_', ' ')}" for name, seconds in worst if seconds > 0]
    return ", ".join(words) or "the sum of small differences"


def candidates_table(candidates: Sequence[Candidate], capacity: float) -> Table:
    """Return the table of candidates, best first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("#", "pp", "tp", "dp", "ep", "schedule", "v", "ZeRO", "b", "m", "recompute", "sp", "step s",
               "tok/s/GPU", "MFU", "memory GiB", "margin", "bubble", "exposed s")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in ("schedule", "recompute", "sp") else "right", no_wrap=True)
    for i, candidate in enumerate(candidates):
        config, score = candidate.config, candidate.score
        table.add_row(
            str(i + 1), str(config.pp), str(config.tp), str(config.dp), str(config.ep), config.schedule,
            str(config.virtual_stages), str(config.zero), str(config.micro_batch), str(config.num_microbatches),
            config.recompute, "on" if config.sequence_parallel else "off", f"{score.step_time_s:.3f}",
            f"{score.tokens_per_s_per_gpu:,.0f}", f"{score.mfu:.1%}", f"{score.worst_row_bytes / GIB:.1f}",
            f"{score.margin_bytes / GIB:.1f}", f"{score.bubble_ratio:.1%}",
            f"{sum(score.exposed_communication_s.values()):.3f}",
        )  # fmt: skip
    return table


def summary(result: Result, space: Space, top: int) -> list[str]:
    """Return the lines under the table: layers a stage, the space, what was pruned and why, the proof gap."""
    best = result.best
    lines = [f"layers per stage of the best: {', '.join(map(str, best.layers_per_stage))}"]
    axes = "; ".join(f"{name} {_domain(values)}" for name, values in space.axes().items())
    lines.append(f"space: N = {result.size:,} configurations, orders not counted ({axes})")
    pruned = ", ".join(f"{reason} {n:,}" for reason, n in sorted(result.pruned.items(), key=lambda item: -item[1]))
    lines.append(f"{result.simulated:,} built, verified and simulated; the rest ruled out: {pruned or 'none'}")
    gap = "0 %: nothing left can beat the best" if result.proof_gap == 0 else f"{result.proof_gap:.2%}"
    lines.append(f"proof gap under these costs: {gap}; stopped after {result.wall_s:.1f} s ({_WORDS[result.stopped]})")
    front = [i + 1 for i in pareto(result.candidates) if i < top]
    lines.append(f"quickest at its memory: {', '.join(map(str, front))} of the table")
    return lines


def _domain(values: Sequence[object]) -> str:
    shown = [str(v) for v in values]
    return "{" + ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]]) + "}"
