"""What one prediction prints for people: how fast, where the step goes, what fills memory, what holds it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from piper_core.ir.action import COMPUTE_KINDS, ActionKind
from profiler import console

if TYPE_CHECKING:
    from search.predict import Prediction
    from search.simulator.run import Simulation

GIB = 2**30
BAR = 24


def show_prediction(found: Prediction, *, capacity_bytes: float) -> str:
    """Return the whole report."""
    score, header = found.score, found.strategy.header
    lines = [*_headline(found)]
    lines.append(
        f"step {_seconds(score.step_time_s)}, {score.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{score.model_tflops_per_gpu:,.1f} model TFLOP/s/GPU, MFU {score.mfu:.1%}, bubble {score.bubble_ratio:.1%} "
        f"(sync: {header.sync})"
    )
    lines += ["", "where a step goes, mean over rows", _bars(score.breakdown, score.step_time_s, _seconds)]
    worst = max(range(len(score.memory)), key=lambda r: (score.peak_memory_bytes[r], -r))
    at = found.compiled.plan.action(found.memory.rows[worst].peak_at)
    lines += ["", f"memory of the fullest row, {worst}, GiB; peak at {at}"]
    lines += [_bars(score.memory[worst], score.worst_row_bytes, _gib)]
    peaks = _some([_gib(size) for size in score.peak_memory_bytes])
    lines.append(
        f"{score.verdict}: {_gib(score.worst_row_bytes)} of {_gib(capacity_bytes)} GiB, "
        f"{_gib(score.margin_bytes)} free; rows: {peaks}"
    )
    lines += ["", *critical_path_lines(found.simulation)]
    return "\n".join(lines)


def critical_path(simulation: Simulation) -> dict[str, Any]:
    """Return what lies on the longest path of the first step: seconds by kind of action and by row, and the path
    itself as runs on one row."""
    path = simulation.critical_path_s()
    kinds: dict[str, float] = {}
    rows: dict[str, float] = {}
    for row, action, seconds in path:
        kinds[_word(action.kind)] = kinds.get(_word(action.kind), 0.0) + seconds
        rows[str(row)] = rows.get(str(row), 0.0) + seconds
    runs = [
        {"row": row, "actions": " ".join(str(action) for _, action, _ in run)}
        for row, run in ((row, list(each)) for row, each in groupby(path, key=lambda item: item[0]))
    ]
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return {"seconds": simulation.makespan_s, "by_kind_s": ordered, "by_row_s": rows, "runs": runs}


def critical_path_lines(simulation: Simulation) -> list[str]:
    """Say in a few lines what the longest path is made of."""
    found = critical_path(simulation)
    total = found["seconds"] or 1.0
    kinds = [f"{kind} {s / total:.1%}" for kind, s in found["by_kind_s"].items() if s >= 0.0005 * total]
    rows = [f"row {row} {s / total:.1%}" for row, s in found["by_row_s"].items() if s >= 0.0005 * total]
    runs = [f"{run['row']}: {_ends(run['actions'].split())}" for run in found["runs"]]
    return [
        f"critical path of the first step, {_seconds(found['seconds'])}: {', '.join(kinds)}",
        f"  by row: {_some(rows)}",
        f"  in order, by row: {_some(runs, 8, '; ')}",
    ]


def _headline(found: Prediction) -> list[str]:
    header, config, plan = found.strategy.header, found.config, found.compiled.plan
    ranks = len({rank for row in plan.rows for rank in row})
    batch = f", global batch {header.global_batch}" if header.global_batch else ""
    first = (
        f"{found.compiled.dag.model.name} on {ranks} GPUs of {header.cluster}{batch}, "
        f"sequence {found.compiled.dag.model.seq_len}"
    )
    if config is None:
        return [first, f"{len(plan.rows)} rows of {len(plan.rows[0])} ranks, {plan.stages} stages, "
                       f"{plan.microbatches} microbatches"]  # fmt: skip
    from search.predict import layers_of

    sequence = " with sequence parallelism" if config.sequence_parallel else ""
    degrees = [f"{name}{n}" for name, n in (("PP", config.pp), ("TP", config.tp), ("CP", config.cp), ("DP", config.dp),
                                           ("EP", config.ep)) if n > 1]  # fmt: skip
    virtual = f" v{config.virtual_stages}" if config.virtual_stages > 1 else ""
    layers = [str(n) for n in layers_of(found.compiled.dag)]
    return [
        first,
        f"{' '.join(degrees) or 'one GPU'}{sequence}, {config.schedule}{virtual}, ZeRO-{config.zero}, "
        f"{config.num_microbatches} microbatches of {config.micro_batch}, recompute {config.recompute}, "
        f"layers per stage {_some(layers)}",
    ]


def _bars(parts: Mapping[str, float], total: float, text: Any) -> str:
    shown = sorted(((name, size) for name, size in parts.items() if size), key=lambda item: -item[1])
    rows = [
        (f"  {name.replace('_', ' ')}", text(size), f"{size / total:.1%}" if total else "-",
         "#" * round(BAR * size / total) if total else "")
        for name, size in shown
    ]  # fmt: skip
    return console.table(("  ", "", "", ""), rows).split("\n", 1)[-1]


def _word(kind: ActionKind) -> str:
    if kind in COMPUTE_KINDS or kind is ActionKind.UPDATE:
        return str(kind)
    return kind.value.lower().replace("_", " ")


def _ends(words: Sequence[str]) -> str:
    return " ".join(words) if len(words) <= 5 else f"{words[0]} {words[1]} ... {words[-1]} ({len(words)} actions)"


def _some(words: Sequence[str], most: int = 16, between: str = ", ") -> str:
    if len(words) <= most:
        return between.join(words)
    return between.join([*words[: most // 2], "...", *words[-most // 2 :]])


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
