"""The schedule as a CSV that ``torch.distributed.pipelining`` loads and runs.

``_PipelineScheduleRuntime._load_csv(file)`` (torch >= 2.9, format ``compute_only``): one line a pipeline rank, one cell
an action such as ``0F0``, ``1I2``, ``1W2``, ``0B3`` or ``(0F2;1B0)OVERLAP_F_B``. torch adds sends, receives, unshard,
reshard and gradient reduction itself.
"""

from __future__ import annotations

import csv
import io

from piper_core.errors import ConfigError
from piper_core.ir.action import PHASE_OF_KIND, Action, ActionKind, Slot
from search.cli.show import count
from search.export import schedule_script
from search.export.base import Export
from search.export.job import Job
from search.slots import compute_slots

FILE = "schedule.csv"
_LETTER = {ActionKind.F: "F", ActionKind.B: "B", ActionKind.BI: "I", ActionKind.BW: "W"}


def export(job: Job) -> Export:
    """Return ``schedule.csv``, and ``run_schedule.py``, which runs it on a small model.

    Raises:
        ConfigError: a stage on two rows, which torch's runtime does not have.
    """
    lost = []
    rows = schedule_rows(job)
    if set(job.recompute) - {"none"}:
        lost.append("recompute has no action of its own in torch: wrap the layers in activation checkpointing, which "
                    "runs forward again at the start of each backward")  # fmt: skip
    split = _split_overlaps(job)
    if split:
        lost.append(f"{split} overlap groups that are not one forward and one whole backward became sequences")
    if job.dp > 1:
        lost.append("gathers and reductions of data parallelism are placed by torch: UNSHARD ahead of a stage's first "
                    "use, REDUCE_GRAD after its last backward; buckets and streams are FSDP's own")  # fmt: skip
    layers = ", ".join(map(str, job.layers))
    stages = "; ".join(
        f"rank {row}: stages {', '.join(str(s) for s, held in enumerate(job.rows_of) if row in held)}"
        for row in range(job.pp)
    )
    return Export(
        {FILE: text_of(rows), schedule_script.FILE: schedule_script.script(job, FILE)},
        tuple(lost),
        (
            f"{count(job.pp, 'pipeline rank')}, {count(job.stages, 'stage')} of {layers} layers, "
            f"{count(job.microbatches, 'microbatch', 'es')}; {stages}",
            f"runtime = _PipelineScheduleRuntime(stages, n_microbatches={job.microbatches}, loss_fn=loss_fn); "
            f"runtime._load_csv({FILE!r})",
            f"torchrun --standalone --nproc-per-node {job.pp} {schedule_script.FILE} runs it on a small model, and "
            "compares gradients with autograd's",
            "torch scales gradients by 1 / microbatches (scale_grads=True), for a loss that is a mean",
        ),
    )


def schedule_rows(job: Job) -> list[list[str]]:
    """Return the cells of each pipeline rank.

    Raises:
        ConfigError: a stage on two rows.
    """
    twice = [stage for stage, held in enumerate(job.rows_of) if len(held) > 1]
    if twice:
        raise ConfigError(
            f"torch's pipeline runtime has one rank for a stage, and stage {twice[0]} lies on rows "
            f"{', '.join(map(str, job.rows_of[twice[0]]))}; a V schedule such as dualpipev comes near"
        )
    return [[cell for slot in _slots(job, row) for cell in _cells(slot)] for row in range(job.pp)]


def text_of(rows: list[list[str]]) -> str:
    """Return the CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cells(slot: Slot) -> list[str]:
    if _is_pair(slot):
        forward, backward = sorted(slot, key=lambda action: action.kind is not ActionKind.F)
        return [f"({_cell(forward)};{_cell(backward)})OVERLAP_F_B"]
    return [_cell(action) for action in slot if action.kind is not ActionKind.R]


def _slots(job: Job, row: int) -> list[Slot]:
    """Return a row's compute with the overlap groups of the program, also where nothing inside them communicates."""
    group_of = {member: i for i, group in enumerate(job.dag.overlaps) for member in group}
    slots: list[Slot] = []
    last = -1
    for slot in compute_slots(job.compiled.plan, row):
        groups = {group_of.get((a.stage, int(PHASE_OF_KIND[a.kind]), a.microbatch or 0), -1) for a in slot}
        same = groups.pop() if len(groups) == 1 else -1
        if same >= 0 and same == last:
            slots[-1] += slot
        else:
            slots.append(slot)
        last = same
    return slots


def _is_pair(slot: Slot) -> bool:
    return sorted(action.kind for action in slot) == [ActionKind.B, ActionKind.F]


def _cell(action: Action) -> str:
    return f"{action.stage}{_LETTER[action.kind]}{action.microbatch or 0}"


def _split_overlaps(job: Job) -> int:
    plan = job.compiled.plan
    return sum(len(slot) > 1 and not _is_pair(slot) for row in range(job.pp) for slot in compute_slots(plan, row))
