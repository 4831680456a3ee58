"""The validation as text, as JSON, and as a picture of predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from math import ceil, floor, log10
from typing import Any

from search.report.charts import PALETTE
from search.validation.leave_out import LeftOut
from search.validation.scores import Errors, Pair, errors
from search.validation.validate import DEVICE, Validation

SIDE, EDGE, KEY = 520, 60, 300
"""Pixels of the plot's side, of its margin, and of the key beside it."""


def text(found: Validation, left_out: Sequence[LeftOut] = ()) -> str:
    """Return the report as lines."""
    lines = [f"step time, {DEVICE}: {len(found.pairs)} of {found.rows} published runs predicted", _HEAD]
    lines += [_line(source, each) for source, each in found.by_source(found.pairs).items()]
    lines.append(_line("all", errors(found.pairs)))
    lines += [f"  {count} not predicted: {why}" for why, count in found.not_predicted]
    for title, pairs in (("other devices", found.elsewhere), ("small models", found.small)):
        if pairs:
            lines += ["", f"step time, {title}", _HEAD]
            lines += [_line(source, each) for source, each in found.by_source(pairs).items()]
    lines += ["", "sweeps over layouts (quickest kernel of each)", f"{'table':64s} layouts    tau  spread  regret"]
    lines += [
        f"{each.table:64s} {each.layouts:7d} {each.tau:6.3f} {each.spread:7.1%} {100 * each.regret:7.1f}"
        + (" and out of memory" if each.picked_out_of_memory else "")
        for each in found.sweeps
    ]
    lines += [
        f"  without {each.doubted} runs of {each.table} that others contradict (search/validation/doubts.py): "
        f"tau {each.sure[0]:.3f}, spread {each.sure[1]:.1%}"
        for each in found.sweeps
        if each.doubted
    ]
    fits = found.fits
    said = (
        f"memory: of {sum(fits.out_of_memory.values())} runs out of memory {fits.false_fit:.1%} said to fit",
        f"of {sum(fits.ran.values())} that ran {fits.false_out_of_memory:.1%} said not to",
        f"{fits.close:.1%} close",
    )
    lines += ["", "; ".join(said)]
    off = [abs(each.predicted_gib / each.measured_gib - 1) for each in found.peaks]
    lines.append(f"peak memory, {len(off)} runs: mean error {sum(off) / len(off):.1%}, worst {max(off):.1%}")
    gaps = [abs(each.predicted - each.measured) for each in found.gains]
    near = sum(gap <= 0.03 for gap in gaps)
    lines.append(f"gain of {len(gaps)} zero-bubble and interleaved runs over 1F1B: {near} within 3 points, "
                 f"worst {100 * max(gaps):.1f}")  # fmt: skip
    if left_out:
        lines += ["", "leave one source out (a sample of each): error with the constants as they are, and refitted "
                  "without the source", f"{'source':58s} runs      as  refitted"]  # fmt: skip
        lines += [f"{each.source[:58]:58s} {each.runs:4d} {each.error:7.1%} {each.refitted:9.1%}" for each in left_out]
    return "\n".join(lines)


_HEAD = f"{'source':48s} runs    mean  median    bias   worst  spread"


def _line(source: str, each: Errors) -> str:
    return (
        f"{source[:48]:48s} {each.count:4d} {each.mean:7.1%} {each.median:7.1%} {each.bias:+7.1%} {each.worst:7.1%} "
        f"{each.spread:7.1%}"
    )


def to_data(found: Validation, left_out: Sequence[LeftOut] = ()) -> dict[str, Any]:
    """Return the JSON form."""
    fits = found.fits
    return {
        "device": DEVICE,
        "rows": found.rows,
        "predicted": len(found.pairs),
        "all": asdict(errors(found.pairs)),
        "sources": {source: asdict(each) for source, each in found.by_source(found.pairs).items()},
        "elsewhere": {source: asdict(each) for source, each in found.by_source(found.elsewhere).items()},
        "small": {source: asdict(each) for source, each in found.by_source(found.small).items()},
        "not_predicted_because": dict(found.not_predicted),
        "sweeps": [asdict(each) for each in found.sweeps],
        "fits": {
            "ran": dict(fits.ran), "out_of_memory": dict(fits.out_of_memory), "false_fit": fits.false_fit,
            "false_out_of_memory": fits.false_out_of_memory, "close": fits.close,
        },
        "gains": [asdict(each) for each in found.gains],
        "peaks": [asdict(each) for each in found.peaks],
        "leave_one_out": [asdict(each) for each in left_out],
    }  # fmt: skip


def picture(pairs: Sequence[Pair]) -> str:
    """Return predicted against measured step times as SVG, both axes logarithmic; the band is 10 % to either side."""
    times = [value for pair in pairs for value in (pair.measured_s, pair.predicted_s)]
    low, high = floor(2 * log10(min(times))) / 2, ceil(2 * log10(max(times))) / 2
    sources = list(dict.fromkeys(pair.source for pair in pairs))
    colour = {source: PALETTE[i % len(PALETTE)] for i, source in enumerate(sources)}

    def at(seconds: float) -> float:
        return (log10(seconds) - low) / (high - low) * SIDE

    def point(measured_s: float, predicted_s: float) -> str:
        return f"{EDGE + at(measured_s):.1f},{EDGE + SIDE - at(predicted_s):.1f}"

    ends = 10**low, 10**high
    upper, lower = (tuple(point(end, end * factor) for end in ends) for factor in (1.1, 1 / 1.1))
    band = " ".join((*upper, *reversed(lower)))
    body = [
        f'<clipPath id="plot"><rect x="{EDGE}" y="{EDGE}" width="{SIDE}" height="{SIDE}"/></clipPath>',
        f'<rect x="{EDGE}" y="{EDGE}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        f'<polygon points="{band}" fill="#ddd" clip-path="url(#plot)"/>',
        f'<polyline points="{point(ends[0], ends[0])} {point(ends[1], ends[1])}" stroke="#888" fill="none"/>',
    ]
    for power in range(ceil(low), floor(high) + 1):
        along, label = at(10.0**power), f"{10.0**power:g} s"
        body.append(f'<text x="{EDGE + along:.1f}" y="{EDGE + SIDE + 20}" text-anchor="middle">{label}</text>')
        body.append(f'<text x="{EDGE - 8}" y="{EDGE + SIDE - along + 4:.1f}" text-anchor="end">{label}</text>')
    for pair in pairs:
        x, y = point(pair.measured_s, pair.predicted_s).split(",")
        name = escape(f"{pair.source}: measured {pair.measured_s:.4g} s, predicted {pair.predicted_s:.4g} s")
        body.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour[pair.source]}" fill-opacity="0.7">'
                    f"<title>{name}</title></circle>")  # fmt: skip
    for i, source in enumerate(sources):
        y_key = EDGE + 12 + 20 * i
        body.append(f'<circle cx="{EDGE + SIDE + 20}" cy="{y_key - 4}" r="5" fill="{colour[source]}"/>')
        body.append(f'<text x="{EDGE + SIDE + 32}" y="{y_key}">{escape(source[:38])}</text>')
    body.append(f'<text x="{EDGE + SIDE / 2}" y="{EDGE + SIDE + 42}" text-anchor="middle">measured step time</text>')
    body.append(f'<text x="16" y="{EDGE + SIDE / 2}" text-anchor="middle" '
                f'transform="rotate(-90 16 {EDGE + SIDE / 2})">predicted step time</text>')  # fmt: skip
    body.append(f'<text x="{EDGE}" y="{EDGE - 20}">{len(pairs)} published runs; the band is 10 % to either side</text>')
    width, height = 2 * EDGE + SIDE + KEY, 2 * EDGE + SIDE
    body.insert(0, '<rect width="100%" height="100%" fill="white"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">{"".join(body)}</svg>\n'
    )
