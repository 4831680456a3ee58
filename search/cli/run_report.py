"""What ``piper-search run`` says of a run that has ended: lines, JSON, the timeline."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_core.runtime.compare import Difference
    from piper_core.runtime.trainer import Step
    from search.predict import Prediction

NOT_COMPARED = "not compared with the prediction, which is not of float64"
"""Said of a run in a type that no hardware record and no profile at hand is about: a ratio would mean nothing."""
COMPILED = "not compared with the profile, which is of chunks that are not compiled"


def not_compared(dtype: str, *, compiled: bool, profile: Path | None) -> str | None:
    """Return why a run is not compared with a prediction; None where it is."""
    if dtype == "float64" and profile is None:
        return NOT_COMPARED
    return COMPILED if compiled and profile is not None else None


def data_of(steps: list[Step], predicted: Prediction | None) -> dict[str, Any]:
    """Return the JSON form of a run. The first step, in which memory is followed, is not timed."""
    timed = [step.seconds for step in steps[1:]]
    rows = predicted.score.peak_memory_bytes if predicted is not None else ()
    return {
        "mode": "real",
        "ranks": len(steps[0].ranks),
        "losses": [step.loss for step in steps],
        "step_time_s": median(timed) if timed else None,
        "step_times_s": timed,
        "predicted_step_time_s": None if predicted is None else predicted.score.step_time_s,
        "peak_memory_bytes": [each.peak_bytes for each in steps[0].ranks],
        "kept_memory_bytes": [each.kept_bytes for each in steps[0].ranks],
        "peak_by_action": [each.peak_by_action for each in steps[0].ranks],
        "predicted_memory_bytes_by_row": list(rows),
        "timeline": None if steps[-1].timeline is None else steps[-1].timeline.to_data(),
    }


def show(data: dict[str, Any], steps: list[Step], options: Namespace) -> None:
    """Print what a run measured, and what it wrote."""
    found, wanted = data["step_time_s"], data["predicted_step_time_s"]
    if found is not None:
        times = data["step_times_s"]
        beside = f"; predicted {wanted:.4g} s, measured / predicted {found / wanted:.2f}" if wanted else ""
        beside = f"; {data['not_compared']}" if data["not_compared"] else beside
        print(f"step time {found:.4g} s (median of {len(times)}, {min(times):.4g} to {max(times):.4g}){beside}")
    worst = max(steps[0].ranks, key=lambda each: each.peak_bytes)
    at = max(worst.peak_by_action, key=lambda text: worst.peak_by_action[text], default="")
    print(f"peak of tensors {worst.peak_bytes / 2**20:,.1f} MiB, rank {worst.rank} at {at}")
    if data["check"]:
        print(f"checked: {len(data['check'])} steps equal those of one process")
    if steps[-1].timeline is not None:
        print(steps[-1].timeline.picture())
    if data["kept_in"]:
        print(f"kept: {data['kept_in']} (piper-search history)")
    if data["checkpoint"]:
        print(f"saved: {data['checkpoint']}")
    if options.run_timeline is not None:
        print(f"written: {options.run_timeline}")


def plain(each: Difference) -> dict[str, Any]:
    """Return the JSON form of a comparison with one process."""
    return {"loss": each.loss, "gradient": each.gradient, "parameter": each.name, "limit": each.limit}


def write(path: Path, title: str, step: Step, predicted: Prediction | None) -> None:
    """Write the measured timeline of what ``title`` says, on a page the predicted one above it."""
    import json

    from piper_core.program.write import replace_file
    from search.report.perfetto import perfetto
    from search.report.side_by_side import side_by_side
    from search.report.timeline_svg import timeline_svg

    assert step.timeline is not None, "the last step of two or more is timed"
    if path.suffix == ".json":
        replace_file(path, json.dumps(perfetto(step.timeline, label="row")))
        return
    if path.suffix == ".html":
        before = None if predicted is None else (predicted.simulation.timeline(), predicted.score.step_time_s)
        replace_file(path, side_by_side(title, before, (step.timeline, step.seconds)))
        return
    named = f"{title}, measured: {step.seconds:.4g} s a step"
    replace_file(path, timeline_svg(step.timeline, title=named, period_s=step.seconds))
