"""A timeline as a picture: an SVG that needs nothing else, rows of lanes, colours by phase, titles on hover."""

from __future__ import annotations

from html import escape
from math import floor, log10

from piper_core.ir.action import ActionKind
from piper_core.ir.timeline import Event, Lane, Timeline

WIDTH, LEFT, TOP = 1600, 150, 44
COMPUTE_HEIGHT, COMM_HEIGHT, GAP = 26, 9, 10
TEXT_WIDTH = 6.2
"""Pixels of a character at the size of labels inside boxes."""
COLOURS = {
    "F": "#4e79a7", "B": "#59a14f", "BI": "#76b7b2", "BW": "#edc948", "R": "#b07aa1", "UPDATE": "#e15759",
    "send and receive": "#9c755f", "gather": "#f28e2b", "reduce": "#d37295", "other collectives": "#79706e",
}  # fmt: skip
"""By what an event does; the legend shows those that occur."""
PALE = ("BW", "gather")
"""Colours on which labels are dark."""


def timeline_svg(timeline: Timeline, *, title: str = "", period_s: float | None = None) -> str:
    """Return the picture of a timeline.

    Each row has a tall lane of compute and thin ones of its other streams that run anything; ``period_s`` draws a line
    where the next step's first action may stand.
    """
    lanes = [lane for lane in timeline.lanes if any(e.end_s > e.start_s for e in lane.events)]
    end_s = max(timeline.end_s, period_s or 0.0) or 1.0
    scale = (WIDTH - LEFT - 20) / end_s
    body: list[str] = []
    used: set[str] = set()
    y, row = float(TOP), -1
    for lane in lanes:
        if lane.row != row:
            y += GAP if row >= 0 else 0
            row = lane.row
            body.append(f'<text x="8" y="{y + 17:.0f}" class="row">row {row}</text>')
        height = COMPUTE_HEIGHT if lane.stream == "compute" else COMM_HEIGHT
        if lane.stream != "compute":
            body.append(f'<text x="{LEFT - 6}" y="{y + height - 1:.0f}" class="lane">{escape(lane.stream)}</text>')
        body.append(f'<rect x="{LEFT}" y="{y:.0f}" width="{end_s * scale:.1f}" height="{height}" class="bed"/>')
        body += _boxes(lane, y, height, scale, used)
        y += height + 1
    if period_s is not None:
        x = LEFT + period_s * scale
        body.append(f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{y:.0f}" class="period">'
                    f"<title>step time {_time(period_s)}</title></line>")  # fmt: skip
    body += _axis(end_s, scale, y)
    body += _legend(used, y + 34)
    bottom = y + 52
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:.0f}" width="{WIDTH}" '
        f'height="{bottom:.0f}" font-family="sans-serif" font-size="10">',
        "<style>.row{font-size:13px;font-weight:bold}.lane{text-anchor:end;fill:#777;font-size:8px}"
        ".bed{fill:#f3f3f3}.in{fill:#fff;pointer-events:none}.on{fill:#222;pointer-events:none}.tick{stroke:#ccc}"
        ".period{stroke:#c00;stroke-dasharray:4 3}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        *body,
        "</svg>",
    ])  # fmt: skip


def kind_of(event: Event) -> str:
    """Return the name under which an event is coloured."""
    if event.computes:
        return event.kind.value
    verb = event.kind.value
    if verb.startswith(("SEND", "RECV")):
        return "send and receive"
    if verb.startswith("ALL_GATHER"):
        return "gather"
    if verb.startswith(("REDUCE_SCATTER", "ALL_REDUCE")):
        return "reduce"
    return "other collectives"


def _boxes(lane: Lane, y: float, height: int, scale: float, used: set[str]) -> list[str]:
    boxes = []
    for event in lane.events:
        if event.end_s <= event.start_s or event.kind is ActionKind.FREE:
            continue
        kind = kind_of(event)
        used.add(kind)
        x, width = LEFT + event.start_s * scale, max(0.3, event.seconds * scale)
        title = f"{event.text} ({kind}), row {lane.row} {lane.stream}: {_time(event.start_s)} + {_time(event.seconds)}"
        gap = 0.4 if width > 2 else 0.0
        boxes.append(
            f'<rect x="{x:.2f}" y="{y:.0f}" width="{width - gap:.2f}" height="{height}" fill="{COLOURS[kind]}">'
            f"<title>{escape(title)}</title></rect>"
        )
        label = next((text for text in (event.text, str(event.action.microbatch if event.action.microbatch is not None
                     else "")) if text and len(text) * TEXT_WIDTH < width), "")  # fmt: skip
        if label and height == COMPUTE_HEIGHT:
            at = x + (width - len(label) * TEXT_WIDTH) / 2
            boxes.append(
                f'<text x="{at:.1f}" y="{y + 17:.0f}" class="{"on" if kind in PALE else "in"}">{escape(label)}</text>'
            )
    return boxes


def _axis(end_s: float, scale: float, y: float) -> list[str]:
    step = 10.0 ** floor(log10(end_s / 5))
    step *= next(f for f in (1, 2, 5, 10) if end_s / (step * f) <= 12)
    made = []
    for i in range(int(end_s / step) + 1):
        x = LEFT + i * step * scale
        made.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{y:.0f}" class="tick" opacity="0.5"/>'
                    f'<text x="{x:.1f}" y="{y + 12:.0f}" text-anchor="middle">{_time(i * step)}</text>')  # fmt: skip
    return made


def _legend(used: set[str], y: float) -> list[str]:
    made: list[str] = []
    x = LEFT
    for name in (name for name in COLOURS if name in used):
        made.append(f'<rect x="{x}" y="{y - 9:.0f}" width="11" height="11" fill="{COLOURS[name]}"/>'
                    f'<text x="{x + 15}" y="{y:.0f}">{name}</text>')  # fmt: skip
        x += 32 + int(len(name) * TEXT_WIDTH)
    return made


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"
