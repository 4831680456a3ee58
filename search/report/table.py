"""What a search prints for people: who won and why, the ten best, how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, log10

from search.engine import Candidate, Result, pareto
from search.space import Configuration, Space

GIB = 2**30
_WORDS = {"proved": "nothing left can be among them", "budget": "time budget spent", "interrupted": "interrupted"}
COLUMNS = (
    "#", "pp", "tp", "dp", "cp", "ep", "schedule", "v", "ZeRO", "b", "m", "recompute", "sp", "cuts", "also", "step s",
    "tok/s/GPU", "MFU", "memory GiB", "margin", "bubble", "exposed s",
)  # fmt: skip
FIRST_TO_GO = (
    "tok/s/GPU", "margin", "exposed s", "sp", "cuts", "also", "recompute", "bubble", "MFU", "cp", "ep", "m", "v",
    "memory GiB", "ZeRO", "b", "dp", "tp", "pp", "schedule",
)  # fmt: skip
"""Columns in the order in which they are left out where all are too wide; the others stay."""
_WORDED = ("schedule", "recompute", "sp", "cuts", "also")
_CUTS = {"balanced": "bal", "even": "even"}


def headline(result: Result) -> str:
    """Return one line that says what won, and why the runner-up lost."""
    best = result.best
    first, last = f"{best.score.mfu:.1%} MFU", "; nothing else that was evaluated fits."
    seconds = step_s(best.score.step_time_s)
    if len(result.candidates) == 1:
        return f"{_describe(best)[0]} wins: {seconds} s a step, {first}{last}"
    other = result.candidates[1]
    winner, second = _describe(best, other)
    if result.objective == "memory":
        more = other.score.worst_row_bytes - best.score.worst_row_bytes
        need = f"needs {more / GIB:.2f} GiB more" if more > 0 else "needs as much"
        return (
            f"{winner} is the leanest: {best.score.worst_row_bytes / GIB:.1f} GiB on its fullest row, {seconds} s "
            f"a step, {first}; the next, {second}, {need} and takes {step_s(other.score.step_time_s)} s."
        )
    total = other.score.step_time_s - best.score.step_time_s
    slower = total / best.score.step_time_s
    if slower < 1e-6:
        last = f"; {second} takes as long and stands second by its name alone."
    elif slower < 1e-3:
        last = f"; the runner-up, {second}, is within 0.1%."
    else:
        last = f"; the runner-up, {second}, is {slower:.1%} slower, by {_why(best, other, total)}."
    return f"{winner} wins: {seconds} s a step, {first}{last}"


def step_s(seconds: float) -> str:
    """Return seconds with four significant digits, and three decimals at least."""
    return f"{seconds:.{_decimals(seconds)}f}"


def _decimals(seconds: float) -> int:
    return max(3, 3 - floor(log10(seconds))) if seconds > 0 else 3


def _describe(*candidates: Candidate) -> list[str]:
    """Return what tells a strategy from most others; of several that read alike, also what they differ in."""
    words = [_words(candidate) for candidate in candidates]
    if len(candidates) > 1 and len(set(words)) == 1:
        finer = [
            (f"sequence parallelism {_on(config)}", f"cuts {config.cuts}", also(config, none=""))
            for config in (replace(candidate.config, order="family") for candidate in candidates)
        ]
        for alike in zip(*finer, strict=True):
            if len(set(alike)) > 1:
                words = [f"{text} {more}".rstrip() for text, more in zip(words, alike, strict=True)]
    return words


def _words(candidate: Candidate) -> str:
    config = candidate.config
    sizes = {"PP": config.pp, "TP": config.tp, "DP": config.dp, "CP": config.cp, "EP": config.ep}
    degrees = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    schedule = config.schedule if config.pp > 1 else "gradient accumulation"
    virtual = f" v{config.virtual_stages}" if config.virtual_stages > 1 and config.pp > 1 else ""
    again = {"none": [], "full": ["recompute"], "selective": ["selective recompute"]}.get(
        config.recompute, [f"recompute {config.recompute} a stage"]
    )
    again += ["list-scheduled"] if config.order == "list" else []
    return " ".join(
        [*degrees, f"{schedule}{virtual}", f"ZeRO-{config.zero}", f"microbatch {config.micro_batch}", *again]
    )


def _on(config: Configuration) -> str:
    return "on" if config.sequence_parallel else "off"


def also(config: Configuration, none: str = "-") -> str:
    """Return what of a configuration's finer choices is not the usual."""
    found = [] if config.outer == "pp" else [f"{config.outer} outer"]
    usual = Configuration(1, 1, 1, 1, config.schedule, 1, 0, 1, 1, "none", False, "")
    for name in ("bucket", "prefetch", "streams", "order"):
        if getattr(config, name) != getattr(usual, name):
            found.append(f"{name} {getattr(config, name)}")
    return ", ".join(found) or none


def _why(best: Candidate, other: Candidate, total: float) -> str:
    """Say where the difference of ``total`` seconds lies: up to three causes, losses and gains, then the rest; what is
    less than a tenth of it is left out."""
    a, b = best.score.breakdown, other.score.breakdown
    causes = {name.replace("_", " "): b.get(name, 0.0) - a.get(name, 0.0) for name in sorted({*a, *b})}
    named = sorted(causes.items(), key=lambda item: (-abs(item[1]), item[0]))[:3]
    named = [(name, seconds) for name, seconds in named if abs(seconds) >= 0.1 * total]
    rest = total - sum(seconds for _, seconds in named)
    if abs(rest) >= 0.1 * total:
        named.append(("the rest", rest))
    decimals = max(0, 2 - floor(log10(total)))
    return f"{total:.{decimals}f} s: " + ", ".join(f"{seconds:+.{decimals}f} s {name}" for name, seconds in named)


def candidates_table(candidates: Sequence[Candidate], width: int | None = None) -> tuple[str, list[str]]:
    """Return the table of candidates, best first, and the columns left out to make it ``width`` characters wide."""
    least = min((candidate.score.step_time_s for candidate in candidates), default=1.0)
    cells = [COLUMNS, *(_row(i + 1, candidate, _decimals(least)) for i, candidate in enumerate(candidates))]
    columns = {name: column for name, *column in zip(COLUMNS, *cells, strict=True)}
    sizes = {name: max(map(len, column)) for name, column in columns.items()}
    left_out: list[str] = []
    for name in FIRST_TO_GO:
        if width is None or sum(sizes.values()) + 2 * (len(sizes) - 1) <= width:
            break
        left_out.append(name)
        del sizes[name]
    lines = [
        "  ".join(
            columns[name][i].ljust(size) if name in _WORDED else columns[name][i].rjust(size)
            for name, size in sizes.items()
        ).rstrip()
        for i in range(len(cells))
    ]
    return "\n".join(lines), left_out


def _row(rank: int, candidate: Candidate, decimals: int) -> tuple[str, ...]:
    config, score = candidate.config, candidate.score
    return (
        str(rank), str(config.pp), str(config.tp), str(config.dp), str(config.cp), str(config.ep),
        config.schedule, str(config.virtual_stages), str(config.zero), str(config.micro_batch),
        str(config.num_microbatches), config.recompute, _on(config), _CUTS.get(config.cuts, config.cuts), also(config),
        f"{score.step_time_s:.{decimals}f}", f"{score.tokens_per_s_per_gpu:,.0f}", f"{score.mfu:.1%}",
        f"{score.worst_row_bytes / GIB:.1f}", f"{score.margin_bytes / GIB:.1f}", f"{score.bubble_ratio:.1%}",
        f"{sum(score.exposed_communication_s.values()):.{decimals}f}",
    )  # fmt: skip


def summary(result: Result, space: Space, top: int) -> list[str]:
    """Return the lines under the table: layers a stage, the space, what was pruned and why, the proof gap."""
    best = result.best
    lines = [f"layers per stage of the best: {', '.join(map(str, best.layers_per_stage))}"]
    axes = "; ".join(f"{name} {_domain(values)}" for name, values in space.axes().items())
    lines.append(f"space: N = {result.size:,} configurations, orders not counted ({axes})")
    pruned = ", ".join(f"{reason} {n:,}" for reason, n in sorted(result.pruned.items(), key=lambda item: -item[1]))
    tried = f" ({result.reordered} with the list scheduler's order)" if result.reordered else ""
    lines.append(f"{result.simulated:,} lowered and simulated{tried}; the rest ruled out: {pruned or 'none'}")
    shown = min(top, len(result.candidates))
    lines.append(
        f"proof gap under these costs: {_gap(result.proof_gap)} over every order, bucket, prefetch and stream; "
        f"{_gap(result.family_gap)} with those of the schedules' families, where {_proved(result, shown)}; "
        f"stopped after {result.wall_s:.1f} s ({_WORDS[result.stopped]})"
    )
    front = [i + 1 for i in pareto(result.candidates) if i < top]
    lines.append(f"quickest at its memory: {', '.join(map(str, front))} of the table")
    return lines


def _gap(part: float) -> str:
    return "0 %" if part < 1e-9 else f"{max(part, 1e-4):.2%}"


def _proved(result: Result, shown: int) -> str:
    """Say which rows nothing that was not evaluated can beat."""
    n = min(result.proved, shown)
    words = []
    if n:
        words.append(_rows(1, n) + (" is proved" if n == 1 else " are proved"))
    if n < shown:
        words.append(_rows(n + 1, shown) + (" is the best found" if n + 1 == shown else " are the best found"))
    return ", ".join(words)


def _rows(first: int, last: int) -> str:
    return f"row {first}" if first == last else f"rows {first} to {last}"


def _domain(values: Sequence[object]) -> str:
    shown = [str(v) for v in values]
    return "{" + ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]]) + "}"
