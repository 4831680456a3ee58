"""Still pictures of a report, as SVG: stacked bars, and time against memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

PALETTE = ("#4e79a7", "#e15759", "#f28e2b", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f", "#d37295", "#79706e",
           "#86bcb6", "#8cd17d")  # fmt: skip
LEFT, RIGHT, BAR, STEP = 190, 90, 18, 26


def stacked(bars: Sequence[tuple[str, Mapping[str, float]]], *, unit: float, suffix: str, limit: float = 0.0) -> str:
    """Return a horizontal stacked bar for each (name, parts); parts keep one colour. ``limit`` draws a line."""
    names = list(dict.fromkeys(name for _, parts in bars for name, size in parts.items() if size > 0))
    colour = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    most = max([limit, *(sum(max(0.0, size) for size in parts.values()) for _, parts in bars)], default=0.0) or 1.0
    width, per = 760, (760 - LEFT - RIGHT) / most
    body: list[str] = []
    for i, (name, parts) in enumerate(bars):
        y, x = 6 + i * STEP, float(LEFT)
        body.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for part, size in parts.items():
            if size <= 0:
                continue
            text = f"{part.replace('_', ' ')}: {size / unit:.3f} {suffix}"
            body.append(f'<rect x="{x:.2f}" y="{y}" width="{size * per:.2f}" height="{BAR}" fill="{colour[part]}">'
                        f"<title>{escape(text)}</title></rect>")  # fmt: skip
            x += size * per
        total = sum(max(0.0, size) for size in parts.values())
        body.append(f'<text x="{x + 6:.1f}" y="{y + 13}" class="soft">{total / unit:.3g} {suffix}</text>')
    bottom = 10 + len(bars) * STEP
    if limit:
        at = LEFT + limit * per
        body.append(f'<line x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{bottom}" stroke="#c0392b" stroke-dasharray="4 3">'
                    f"<title>capacity: {limit / unit:.1f} {suffix}</title></line>")  # fmt: skip
    x, y = float(LEFT), bottom + 16
    for name in names:
        label = name.replace("_", " ")
        if x + 20 + 7 * len(label) > width:
            x, y = float(LEFT), y + 18
        body.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{colour[name]}"/>'
                    f'<text x="{x + 15:.0f}" y="{y}">{escape(label)}</text>')  # fmt: skip
        x += 28 + 7 * len(label)
    return f'<svg viewBox="0 0 {width} {y + 8}" width="{width}">{"".join(body)}</svg>'


def scatter(points: Sequence[tuple[float, float, str, bool]], *, capacity: float) -> str:
    """Return memory (GiB) against step time (s): points of (seconds, bytes, title, whether it is on the front)."""
    gib, width, height, left, bottom = 2**30, 760, 360, 60, 40
    xs, ys = [t for t, *_ in points], [size / gib for _, size, *_ in points]
    low_x, high_x = min(xs), max(xs)
    spread = (high_x - low_x) or low_x * 0.1 or 1.0
    low_x, high_x = low_x - 0.05 * spread, high_x + 0.08 * spread
    low_y, high_y = 0.0, max([*ys, capacity / gib]) * 1.05

    def at(t: float, size: float) -> tuple[float, float]:
        x = left + (t - low_x) / (high_x - low_x) * (width - left - 20)
        return x, height - bottom - (size / gib - low_y) / (high_y - low_y) * (height - bottom - 16)

    body = []
    for t, text in ((value, f"{value:.4g}") for value in _ticks(low_x, high_x)):
        x, _ = at(t, 0)
        body.append(f'<line x1="{x:.1f}" y1="16" x2="{x:.1f}" y2="{height - bottom}" stroke="#e3e7eb"/>'
                    f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{text}</text>')  # fmt: skip
    for size in _ticks(low_y, high_y):
        _, y = at(low_x, size * gib)
        body.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 20}" y2="{y:.1f}" stroke="#e3e7eb"/>'
                    f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{size:.4g}</text>')  # fmt: skip
    _, y = at(low_x, capacity)
    body.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 20}" y2="{y:.1f}" stroke="#c0392b" '
                f'stroke-dasharray="4 3"><title>capacity</title></line>')  # fmt: skip
    front = sorted((at(t, size) for t, size, _, best in points if best), key=lambda point: point[0])
    if len(front) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
        body.append(f'<polyline points="{line}" fill="none" stroke="#2f5f98" opacity="0.5"/>')
    for t, size, title, best in sorted(points, key=lambda point: point[3]):  # the front above the others
        x, y = at(t, size)
        fill, radius = ("#2f5f98", 6) if best else ("#aab4be", 4)
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"><title>{escape(title)}</title></circle>'
        )
    middle = (left + width - 20) / 2
    body.append(f'<text x="{middle:.0f}" y="{height - 4}" text-anchor="middle" class="soft">seconds a step</text>'
                f'<text x="4" y="11" class="soft">GiB, fullest row</text>')  # fmt: skip
    return f'<svg viewBox="0 0 {width} {height}" width="{width}">{"".join(body)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about six round numbers between two others."""
    from math import ceil, floor, log10

    rough = (high - low) / 6
    power = 10.0 ** floor(log10(rough))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
    return [i * step for i in range(ceil(low / step), floor(high / step) + 1)]
