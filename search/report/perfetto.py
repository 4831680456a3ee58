"""A timeline in the trace event format that Perfetto and Chrome read."""

from __future__ import annotations

from typing import Any

from piper_core.ir.timeline import Timeline


def perfetto(timeline: Timeline, *, label: str = "rows") -> dict[str, Any]:
    """Return the trace: a process a row, a thread a stream, complete events in microseconds.

    Source: the Trace Event Format document of the Chromium project (phases X and M).
    """
    events: list[dict[str, Any]] = []
    for row in range(timeline.rows):
        events.append({"ph": "M", "pid": row, "name": "process_name", "args": {"name": f"{label} {row}"}})
        for thread, lane in enumerate(timeline.row(row)):
            events.append({"ph": "M", "pid": row, "tid": thread, "name": "thread_name", "args": {"name": lane.stream}})
            events += [
                {
                    "ph": "X", "pid": row, "tid": thread, "name": event.text, "cat": event.kind.value,
                    "ts": event.start_s * 1e6, "dur": event.seconds * 1e6,
                }
                for event in lane.events
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
