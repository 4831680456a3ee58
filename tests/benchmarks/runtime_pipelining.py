"""Steps against torch.distributed.pipelining: same model, order, loss and optimizer, two gloo ranks, a thread each.

Both systems live in the same two processes and take turns; of each pair of steps the ratio of times is taken, and the
median of ratios is shown, of wall time and of the CPU seconds of both processes (all that can be compared where others
use the machine too). "path" is our step against the longest path through its own order at the chunk times measured in
steps of the same round: what is above 1 is what the runtime adds. Limits on wall time hold on a machine that does
nothing else: PIPER_BENCH_SHARED=1 prints without judging. PIPER_BENCH_PAIRS sets the number of pairs,
PIPER_BENCH_SCHEDULES and PIPER_BENCH_SHAPES choose.

PIPER_BENCH_SHAPES=compiled is half the first model with both sides compiled by Inductor, ours chunk by chunk, torch's
stage by stage; only for schedules whose backward is whole. Heaps keep what is freed, for both systems.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

RANKS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and how it is cut; ``limit`` is the greatest geometric mean of ratios, ``each`` the greatest ratio,
    ``path`` the greatest ratio of our step to our longest path (None: that is not judged)."""

    name: str
    hidden: int
    seq_len: int
    microbatches: int
    layers: int
    pairs: int
    limit: float
    each: float
    path: float | None
    compiled: bool = False


SHAPES = (
    Shape("compute", 512, 256, 8, 8, 7, 0.97, 1.0, 1.05),
    Shape("runtime", 64, 32, 64, 8, 9, 0.7, 1.0, None),
    Shape("compiled", 512, 256, 8, 4, 7, 1.0, 1.0, None, compiled=True),
)
WHOLE = ("GPipe", "1F1B", "Interleaved1F1B")
"""Schedules whose backward is whole."""
SCHEDULES = {
    "GPipe": ("ScheduleGPipe", "gpipe", 1),
    "1F1B": ("Schedule1F1B", "1f1b", 1),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", "interleaved_1f1b", 2),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", "", 2),
    "ZBV": ("ScheduleZBVZeroBubble", "zbv", 2),
    "DualPipeV": ("ScheduleDualPipeV", "dualpipev", 2),
}
"""torch's class; our family, "" for torch's own order; stages on each rank."""


def main() -> int:
    """Print the table; return 1 when a limit is broken."""
    import torch

    from tests.torch_cpu.parallel import ranks

    torch.set_num_threads(1)
    ranks.LIMIT_S = 900.0
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of its own in each rank
    chosen = os.environ.get("PIPER_BENCH_SCHEDULES", ",".join(SCHEDULES)).split(",")
    shapes = [s for s in SHAPES if s.name in os.environ.get("PIPER_BENCH_SHAPES", "compute,runtime")]
    judged, kept = os.environ.get("PIPER_BENCH_SHARED", "") in ("", "0"), True
    for shape in shapes:
        source(shape).cut  # noqa: B018  # captured before the forks, which share it
        print(f"{shape.name}: hidden {shape.hidden}, sequence {shape.seq_len}, {shape.layers} layers, "
              f"{shape.microbatches} microbatches")  # fmt: skip
        print(f"{'schedule':24}{'ours ms':>9}{'torch ms':>10}{'ratio':>8}{'limit':>7}{'CPU':>8}{'path':>8}")
        table = []
        for schedule in (each for each in chosen if not shape.compiled or each in WHOLE):
            with tempfile.TemporaryDirectory() as folder:
                found = ranks.on_ranks(compare, RANKS, f"{folder}/store", shape, schedule)
            pairs = list(zip(*(each.pairs for each in found), strict=True))
            ours, theirs = (statistics.median(max(each.wall[i] for each in pair) for pair in pairs) for i in (0, 1))
            row = Row(
                statistics.median(pair[0].wall[0] / pair[0].wall[1] for pair in pairs),
                statistics.median(sum(p.cpu[0] for p in pair) / sum(p.cpu[1] for p in pair) for pair in pairs),
                statistics.median(step / path for step, path in paths(found)),
            )
            table.append(row)
            print(f"{schedule:24}{1e3 * ours:9.1f}{1e3 * theirs:10.1f}{row.wall:8.3f}{shape.each:7.2f}{row.cpu:8.3f}"
                  f"{row.path:8.3f}", flush=True)  # fmt: skip
        mean = Row(*(statistics.geometric_mean(values) for values in zip(*table, strict=True)))
        print(f"{'geometric mean':24}{mean.wall:27.3f}{shape.limit:7.2f}{mean.cpu:8.3f}{mean.path:8.3f}", flush=True)
        kept &= mean.wall <= shape.limit and max(row.wall for row in table) <= shape.each
        if shape.path is not None:
            print(f"limit of path {shape.path:.2f}, each schedule")
            kept &= max(row.path for row in table) <= shape.path
    return 0 if kept or not judged else 1


class Row(NamedTuple):
    """Medians of one schedule: ours by theirs in wall and in CPU time, our step by its longest path."""

    wall: float
    cpu: float
    path: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Wall and CPU seconds of our and of torch's step, and of a step of ours that was recorded: how long it took, and
    how long each action of compute, by its text."""

    wall: tuple[float, float]
    cpu: tuple[float, float]
    recorded_s: float
    actions: dict[str, float]


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured, and our order."""

    pairs: list[Pair]
    grid: Any


def paths(found: list[Found]) -> Iterator[tuple[float, float]]:
    """Yield, for each recorded step, how long it took and the longest path at its median chunk times."""
    from piper_core.ir.action import PHASE_OF_KIND, Action, ActionKind
    from piper_core.schedule.span import evaluate

    for pair in zip(*(each.pairs for each in found), strict=True):
        times: dict[tuple[int, Any], list[float]] = {}
        updates = [0.0] * len(pair)
        for rank, each in enumerate(pair):
            for text, seconds in each.actions.items():
                action = Action.parse(text)
                if action.kind is ActionKind.UPDATE:
                    updates[rank] += seconds
                else:
                    times.setdefault((action.stage, PHASE_OF_KIND[action.kind]), []).append(seconds)
        span = evaluate(found[0].grid, {key: statistics.mean(values) for key, values in times.items()})
        ends = (end + update for end, update in zip(span.last_end_s, updates, strict=True))
        yield max(each.recorded_s for each in pair), max(ends)


def compare(rank: int, shape: Shape, schedule: str) -> Found:
    """Return what a rank measures."""
    import torch
    import torch.distributed as dist

    from piper_core.frontend.heap import keep_heap
    from piper_core.runtime.measure import record

    torch.set_num_threads(1)
    keep_heap()  # for both systems, which share the process; else how either frees memory costs the other page faults
    cores = sorted(range(os.cpu_count() or 1))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.manual_seed(0)
    tokens, targets = (torch.randint(0, VOCAB, (shape.microbatches, shape.seq_len)) for _ in range(2))
    theirs, order = torch_step(rank, shape, schedule, tokens, targets)
    program, grid = our_program(rank, shape, schedule, order)

    def ours() -> float:
        return float(program.step(tokens, targets))

    losses = ours(), theirs()
    if rank == RANKS - 1 or losses[0]:
        found = [x for x in losses if x]
        assert len(found) < 2 or abs(found[0] - found[1]) < 1e-4 * abs(found[1]), losses
    pairs = []
    for pair in range(int(os.environ.get("PIPER_BENCH_PAIRS", shape.pairs)) + 1):
        taken, used = {}, {}
        for which in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            (ours, theirs)[which]()
            used[which] = time.process_time() - start_cpu
            dist.barrier()
            taken[which] = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        recorded = record(program, program.slices(tokens, targets))
        dist.barrier()
        end = time.perf_counter() - start
        actions = {e.text: e.seconds for lane in recorded.lanes for e in lane.events if e.computes}
        pairs.append(Pair((taken[0], taken[1]), (used[0], used[1]), end, actions))
    return Found(pairs[1:], grid)


VOCAB = 512


def _architecture(shape: Shape) -> Any:
    from piper_core.arch.record import Architecture

    return Architecture("bench", shape.layers, shape.hidden, 4 * shape.hidden, 8, 8, shape.hidden // 8, VOCAB)


@cache
def source(shape: Shape) -> Any:
    """Return the model as our runtime takes it."""
    from piper_core.runtime.model import ArchitectureSource

    return ArchitectureSource(_architecture(shape), 1, shape.seq_len, seed=1)


def torch_step(
    rank: int, shape: Shape, schedule: str, tokens: Any, targets: Any
) -> tuple[Callable[[], float], dict[int, list[Any]] | None]:
    """Return a step of torch's runtime, and the order that its schedule has, if it says."""
    import torch
    from torch.distributed import pipelining

    from piper_core.models.stage import Part, build_stage

    kind, _, virtual = SCHEDULES[schedule]
    architecture, count = _architecture(shape), RANKS * virtual
    size = shape.layers // count
    v_shaped = schedule in ("ZBV", "DualPipeV")
    mine = [rank + RANKS * k for k in range(virtual)]
    if v_shaped:
        mine = [rank, count - 1 - rank]
    stages, modules = [], []
    for s in mine:
        part = Part(s * size, (s + 1) * size, embed=s == 0, head=s == count - 1)
        module = build_stage(architecture, part, seed=1)
        if shape.compiled:
            module.compile()
        modules.append(module)
        stages.append(pipelining.PipelineStage(module, s, count, torch.device("cpu")))
    make = getattr(pipelining.schedules, kind)

    def loss(logits: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    runs = make(stages if virtual > 1 else stages[0], shape.microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], 1e-3, fused=True)
    first, last = 0 in mine, count - 1 in mine

    def step() -> float:
        losses: list[Any] = []
        optimizer.zero_grad()
        runs.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step, getattr(runs, "pipeline_order", None)


def our_program(rank: int, shape: Shape, schedule: str, order: dict[int, list[Any]] | None) -> tuple[Any, Any]:
    """Return a rank's program of ours, and its order."""
    from piper_core.arch.closed_form import model_chunks
    from piper_core.ir.action import format_slots, parse_slots
    from piper_core.ir.dag import training_dag
    from piper_core.names import Sync
    from piper_core.program.program import Program
    from piper_core.runtime.gloo import GlooCommunicator
    from piper_core.runtime.lowering import Lowering
    from piper_core.runtime.optimizer import AdamW
    from piper_core.runtime.program import RankProgram, Training
    from piper_core.schedule.compile import compile_program
    from piper_core.schedule.families import get_family
    from piper_core.schedule.grid import Grid, rows_of_stage

    _, family, virtual = SCHEDULES[schedule]
    architecture, count = _architecture(shape), RANKS * virtual
    if family:
        chosen = get_family(family)
        homes = [rows[0] for rows in rows_of_stage(chosen.layout, RANKS, virtual)]
        grid = chosen.grid(RANKS, shape.microbatches, virtual)
        rows = {str(r): format_slots(row) for r, row in enumerate(grid.rows)}
    else:
        assert order is not None
        homes = [s % RANKS for s in range(count)]
        rows = {str(r): " ".join(filter(None, (_word(a) for a in actions))) for r, actions in order.items()}
    data = [
        {"op": "stage", "layers_per_stage": [shape.layers // count] * count},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": shape.microbatches},
        *({"op": "place", "filter": {"PP": s}, "devices": [row]} for s, row in enumerate(homes)),
        {"op": "order", "actions": rows},
    ]
    dag = training_dag(model_chunks(architecture, shape.seq_len), global_batch=shape.microbatches, sync=Sync.NONE)
    compiled = compile_program(Program.parse(data), dag)
    lowering = Lowering(compiled, source(shape), compiler="inductor" if shape.compiled else "none")
    program = RankProgram(lowering, rank, GlooCommunicator(), Training(AdamW(1e-3)))
    one_by_one = (tuple((a,) for slot in parse_slots(rows[str(r)]) for a in slot) for r in range(RANKS))
    return program, Grid(tuple(one_by_one))


def _word(action: Any) -> str:
    """Return an action of torch's in our words."""
    match = re.fullmatch(r"(\d+)(F|B|I|W)(\d+)", str(action)) if action is not None else None
    if match is None:
        return ""
    kind = {"F": "F", "B": "B", "I": "BI", "W": "BW"}[match[2]]
    return f"{match[1]}{kind}{match[3]}"
