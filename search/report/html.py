"""The report of a search: one HTML file that needs no network.

Still pictures are SVG; the timeline and the memory over time are drawn by the script inside (``page.js``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from piper_core.errors import ConfigError
from search.report.charts import scatter, stacked
from search.report.memory_levels import memory_over_time
from search.report.timeline_svg import COLOURS, kind_of

if TYPE_CHECKING:
    from search.predict import Prediction

GIB = 2**30
MOST_BARS, MOST_ROWS = 8, 200
MEANINGS = {
    "F": "forward", "B": "backward", "BI": "backward for inputs", "BW": "backward for weights", "R": "recompute",
    "UPDATE": "optimizer update",
}  # fmt: skip
NOT_MODELLED = (
    "Every time and size here is a prediction of the cost model; the plan behind it is proved to run. Times are of a "
    "first step from a cold start; the dashed line is the step time of the steady state."
)


def html_report(result: Mapping[str, Any], best: Prediction, strategy_text: str) -> str:
    """Return the page.

    Args:
        result: what ``search.engine.to_data`` makes, and optionally ``headline`` and ``search`` (what was searched).
        best: the prediction of the first candidate.

    Raises:
        ConfigError: ``result`` is not a search's result.
    """
    try:
        return _page(result, best, strategy_text)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"not the result of a search: {type(error).__name__} {str(error)[:60]}") from None


def _page(result: Mapping[str, Any], best: Prediction, strategy_text: str) -> str:
    candidates: Sequence[Mapping[str, Any]] = result["candidates"]
    capacity = best.memory.capacity
    asset = files("search.report")
    searched = result.get("search", {})
    title = f"{searched.get('model', best.compiled.dag.model.name)} on {searched.get('gpus', '?')} GPUs of " + str(
        searched.get("cluster", best.strategy.header.cluster)
    )
    bars = [
        (f"{i + 1}  {label(each)}", each["predicted"]["breakdown"]) for i, each in enumerate(candidates[:MOST_BARS])
    ]
    rows = [(f"row {i}", parts) for i, parts in enumerate(best.score.memory)]
    front = set(result["pareto"])
    points = [
        (each["predicted"]["step_time_s"], max(each["predicted"]["peak_memory_bytes"]),
         f"{i + 1}: {label(each)}, {each['predicted']['step_time_s']:.4g} s, "
         f"{max(each['predicted']['peak_memory_bytes']) / GIB:.1f} GiB", each["id"] in front)
        for i, each in enumerate(candidates)
    ]  # fmt: skip
    sections = [
        f"<h1>{escape(title)}</h1>",
        *_paragraph(result.get("headline")),
        *_paragraph(_searched(searched), soft=True),
        _cards(result, best),
        "<h2>Timeline of the best</h2>",
        _timeline_tools(best),
        '<div class="wide"><canvas id="timeline" aria-label="what each stream runs, over time"></canvas></div>',
        "<h2>Memory over the step</h2>",
        _memory_key(len(best.memory.rows)),
        '<canvas id="memory" aria-label="memory of each row, over time"></canvas>',
        "<h2>Where the step goes, and what fills memory</h2>",
        '<div class="pair"><div><p class="soft">Seconds of a step, mean over rows, by candidate</p>',
        stacked(bars, unit=1.0, suffix="s"),
        '</div><div><p class="soft">Peak of each row of the best, by cause; dashed: what a device has</p>',
        stacked(_few(rows), unit=GIB, suffix="GiB", limit=capacity),
        "</div></div>",
        "<h2>Time against memory</h2>",
        '<p class="soft">Every candidate that was evaluated and fits; dark ones are quickest at their memory.</p>',
        scatter(points, capacity=capacity),
        "<h2>Candidates</h2>",
        _table(candidates, front),
        "<h2>The space</h2>",
        _space(result),
        "<h2>Directives of the best</h2>",
        f"<pre>{escape(strategy_text)}</pre>",
        f'<p class="soft">{NOT_MODELLED}</p>',
    ]
    data = json.dumps(_data(best), separators=(",", ":")).replace("</", "<\\/")
    return "\n".join([
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>\n{asset.joinpath('page.css').read_text()}</style></head><body>",
        *sections,
        '<div id="tip"></div>',
        "<noscript><p>The timeline and the memory over time need JavaScript; everything else is here.</p></noscript>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>\n{asset.joinpath('page.js').read_text()}</script>\n</body></html>\n",
    ])  # fmt: skip


def label(candidate: Mapping[str, Any]) -> str:
    """Return a candidate's degrees and schedule in short."""
    degrees = candidate["degrees"]
    words = [f"{name.upper()}{degrees[name]}" for name in ("pp", "tp", "cp", "dp", "ep") if degrees.get(name, 1) > 1]
    if degrees["pp"] > 1:
        v = degrees.get("virtual_stages", 1)
        words.append(f"{candidate['schedule']}" + (f" v{v}" if v > 1 else ""))
    words += [f"Z{candidate['zero_stage']}", f"b{candidate['micro_batch']}"]
    return " ".join(words)


def _paragraph(text: object, *, soft: bool = False) -> list[str]:
    return [f"<p{' class=soft' if soft else ''}>{escape(str(text))}</p>"] if text else []


def _searched(searched: Mapping[str, Any]) -> str:
    fixed = " ".join(f"{name}={','.join(map(str, values))}" for name, values in (searched.get("fix") or {}).items())
    parts = [
        f"global batch {searched['global_batch']}" if "global_batch" in searched else "",
        f"sequence {searched['seq_len']}" if "seq_len" in searched else "",
        f"fixed: {fixed}" if fixed else "",
    ]
    return ", ".join(part for part in parts if part)


def _cards(result: Mapping[str, Any], best: Prediction) -> str:
    score = best.score
    gap = result.get("proof_gap")
    shown = [
        (f"{score.step_time_s:.4g} s", "a step"),
        (f"{score.tokens_per_s_per_gpu:,.0f}", "tokens/s/GPU"),
        (f"{score.mfu:.1%}", "model FLOPs utilisation"),
        (f"{score.worst_row_bytes / GIB:.1f} GiB", f"fullest row, {score.margin_bytes / GIB:.1f} free"),
        (f"{score.bubble_ratio:.1%}", "bubble"),
        (f"{gap:.2%}" if isinstance(gap, int | float) else "-", "proof gap"),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in shown
    ) + "</div>"  # fmt: skip


def _timeline_tools(best: Prediction) -> str:
    used = {kind_of(event) for _, event in best.simulation.timeline().events() if event.end_s > event.start_s}
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(MEANINGS.get(kind, kind))}</span>'
        for kind, colour in COLOURS.items()
        if kind in used
    )
    checked = " checked" if len(best.memory.rows) <= 8 else ""
    return (
        '<div class="tools"><button id="in">zoom in</button><button id="out">zoom out</button>'
        '<button id="whole">whole step</button>'
        f'<label><input type="checkbox" id="streams"{checked}> communication streams</label>'
        f"<span>wheel zooms, dragging moves</span>{keys}</div>"
    )


def _memory_key(rows: int) -> str:
    """Name the lines of the memory picture, in the colours that the script gives them."""
    keys = [
        f'<span class="key"><i style="background:hsl({round(row * 360 / rows)} 60% 42%)"></i>row {row}</span>'
        for row in range(min(rows, 24))
    ]
    return f'<div class="tools">{"".join(keys)}{"<span>...</span>" if rows > 24 else ""}</div>'


def _data(best: Prediction) -> dict[str, Any]:
    """Return what the script draws: lanes of [start, seconds, text, kind] and memory of [time, bytes]."""
    kinds = list(COLOURS)
    timeline = best.simulation.timeline()
    lanes = [
        {
            "row": lane.row,
            "stream": lane.stream,
            "events": [
                [_round(event.start_s), _round(event.seconds), event.text, kinds.index(kind_of(event))]
                for event in lane.events
                if event.end_s > event.start_s
            ],
        }
        for lane in timeline.lanes
    ]
    return {
        "lanes": lanes,
        "kinds": [MEANINGS.get(kind, kind) for kind in kinds],
        "colours": list(COLOURS.values()),
        "dark": kinds.index("BW"),
        "end": max(timeline.end_s, best.score.step_time_s),
        "period": best.score.step_time_s,
        "memory": [[[_round(at), round(size)] for at, size in row] for row in memory_over_time(best)],
        "capacity": best.memory.capacity,
    }


def _round(seconds: float) -> float:
    return round(seconds, 9)


def _few(rows: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """Return at most sixteen rows, the fullest among them."""
    if len(rows) <= 16:
        return rows
    fullest = sorted(rows, key=lambda item: -sum(item[1].values()))[:16]
    return [row for row in rows if row in fullest]


COLUMNS = ("#", "pp", "tp", "cp", "dp", "ep", "schedule", "v", "ZeRO", "b", "m", "recompute", "also", "layers",
           "step s", "tokens/s/GPU", "MFU", "GiB", "free", "bubble")  # fmt: skip
WORDS = ("schedule", "recompute", "also", "layers")
USUAL = {"sequence_parallel": False, "outer": "pp", "bucket": 1, "prefetch": 1, "streams": "own",
         "order": "family"}  # fmt: skip
"""Fields that the table names only where a candidate differs from these."""


def _table(candidates: Sequence[Mapping[str, Any]], front: set[Any]) -> str:
    def row(i: int, each: Mapping[str, Any]) -> tuple[str, ...]:
        degrees, score = each["degrees"], each["predicted"]
        layers = [str(n) for n in each["layers_per_stage"]]
        return (
            f"{i + 1}{' *' if each['id'] in front else ''}",
            *(str(degrees.get(name, 1)) for name in ("pp", "tp", "cp", "dp", "ep")),
            each["schedule"], str(degrees.get("virtual_stages", 1)), str(each["zero_stage"]), str(each["micro_batch"]),
            str(each["num_microbatches"]), each["recompute"], _also(each),
            " ".join(layers if len(layers) <= 8 else [*layers[:6], "...", layers[-1]]),
            f"{score['step_time_s']:.4f}", f"{score['tokens_per_s_per_gpu']:,.0f}", f"{score['mfu']:.1%}",
            f"{max(score['peak_memory_bytes']) / GIB:.1f}", f"{score['margin_bytes'] / GIB:.1f}",
            f"{score['bubble_ratio']:.1%}",
        )  # fmt: skip

    word = [' class="word"' if name in WORDS else "" for name in COLUMNS]
    head = "".join(f"<th{kind}>{name}</th>" for name, kind in zip(COLUMNS, word, strict=True))
    lines = [
        f"<tr{' class=best' if i == 0 else ''}>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row(i, each), word, strict=True))
        + "</tr>"
        for i, each in enumerate(candidates[:MOST_ROWS])
    ]
    left = len(candidates) - MOST_ROWS
    more = f"<p>{left} more are in result.json.</p>" if left > 0 else ""
    return (
        f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
        f'<p class="soft">* quickest at its memory</p>{more}'
    )


def _also(candidate: Mapping[str, Any]) -> str:
    """Name what is unusual about a candidate beside the columns."""
    odd = {name: candidate[name] for name, usual in USUAL.items() if candidate.get(name, usual) != usual}
    return ", ".join(
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}" for name, value in odd.items()
    )


def _space(result: Mapping[str, Any]) -> str:
    space = result["space"]
    gone = sorted(space["pruned"].items(), key=lambda item: -item[1])
    rows = "".join(f'<tr><td class="word">{escape(why)}</td><td>{n:,}</td></tr>' for why, n in gone)
    axes = "".join(
        f'<tr><td class="word">{escape(name)}</td><td class="word">{escape(", ".join(map(str, values)))}</td></tr>'
        for name, values in result.get("axes", {}).items()
    )
    size, simulated = space["size"], space["simulated"]
    counted = f"{size:,} configurations, orders not counted; {simulated:,} lowered and simulated"
    return (
        f"<p>{counted}; the rest ruled out:</p>"
        f'<div class="pair"><div><table>{rows}</table></div><div class="wide"><table>{axes}</table></div></div>'
    )
