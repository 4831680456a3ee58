"""Write the timeline of a prediction: a page, an image, or a trace for Perfetto."""

from __future__ import annotations

import json
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from piper_core.errors import ConfigError

if TYPE_CHECKING:
    from search.predict import Prediction

ENDINGS = (".html", ".svg", ".json")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{margin:12px;font-family:sans-serif}}div{{overflow:auto}}</style></head>
<body><p>One step, predicted; time runs to the right, hover over a box for its action and times.</p>
<div>{picture}</div></body></html>
"""


def check_target(path: Path) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        ConfigError: with the endings or the folder that would do.
    """
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--timeline {path}: the name must end in {', '.join(ENDINGS)}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--timeline {path}: {path.parent} is no folder that can be written to")


def write_timeline(found: Prediction, path: Path) -> None:
    """Write the first step of a prediction, whole or not at all, as the ending of ``path`` says."""
    from piper_core.program.write import replace_file

    timeline = found.simulation.timeline()
    if path.suffix == ".json":
        from search.report.perfetto import perfetto

        replace_file(path, json.dumps(perfetto(timeline, label="row")))
        return
    from search.report.timeline_svg import timeline_svg

    header, score = found.strategy.header, found.score
    title = (
        f"{found.compiled.dag.model.name}, {header.mesh or ''} on {header.cluster}: "
        f"{score.step_time_s:.4g} s a step, MFU {score.mfu:.1%}, bubble {score.bubble_ratio:.1%}"
    )
    picture = timeline_svg(timeline, title=title, period_s=score.step_time_s)
    replace_file(path, picture if path.suffix == ".svg" else PAGE.format(title=escape(title), picture=picture))
