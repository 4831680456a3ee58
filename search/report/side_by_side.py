"""One step as it was predicted and as it was measured: a page of two pictures, and what each kind of action took."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from piper_core.ir.timeline import Timeline
from search.report.timeline_svg import COLOURS, kind_of, timeline_svg

COMPUTE = ("F", "B", "BI", "BW", "R", "UPDATE")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{margin:12px;font-family:sans-serif}}div{{overflow:auto}}table{{border-collapse:collapse;margin:12px 0}}
td,th{{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}}i{{display:inline-block;width:11px;height:11px}}
</style></head><body><p>{title}. Time runs to the right, in each picture to the end of its own step; hover over a box
for its action and times. A measured message lasts from when it was posted to when somebody waited for it.</p>
<div>{predicted}</div>
<div>{measured}</div>
{table}
</body></html>
"""


def side_by_side(title: str, predicted: tuple[Timeline, float] | None, measured: tuple[Timeline, float]) -> str:
    """Return the page; each timeline comes with the seconds of its step. ``predicted`` is None where nothing was."""
    before, table = "<p>Nothing was predicted of this run.</p>", ""
    if predicted is not None:
        before, table = _picture("predicted", *predicted), _table(predicted[0], measured[0])
    return PAGE.format(
        title=escape(title), predicted=before, measured=_picture("measured", *measured), table=table
    )  # fmt: skip


def mean_by_kind(timeline: Timeline) -> dict[tuple[int, str], float]:
    """Return the mean seconds of the actions of each row and kind of compute."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for lane, event in timeline.events():
        if lane.stream == "compute" and kind_of(event) in COMPUTE and event.end_s > event.start_s:
            found[lane.row, kind_of(event)].append(event.seconds)
    return {key: sum(each) / len(each) for key, each in found.items()}


def _picture(name: str, timeline: Timeline, seconds: float) -> str:
    return timeline_svg(timeline, title=f"{name}: {seconds:.4g} s a step", period_s=seconds)


def _table(predicted: Timeline, measured: Timeline) -> str:
    wanted, found = mean_by_kind(predicted), mean_by_kind(measured)
    both = sorted(wanted.keys() & found.keys(), key=lambda key: (key[0], COMPUTE.index(key[1])))
    lines = [
        f'<tr><td>row {row}</td><td><i style="background:{COLOURS[kind]}"></i> {kind}</td>'
        f"<td>{wanted[row, kind] * 1e3:.4g}</td><td>{found[row, kind] * 1e3:.4g}</td>"
        f"<td>{found[row, kind] / wanted[row, kind]:.2f}</td></tr>"
        for row, kind in both
    ]
    head = "<tr><th></th><th>mean action</th><th>predicted ms</th><th>measured ms</th><th>ratio</th></tr>"
    return f"<table>{head}\n{chr(10).join(lines)}</table>"
