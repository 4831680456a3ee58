"""``piper-search check``: compile a strategy file, prove that its plan runs, price it, print it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_core.directives import Order, Stage
from piper_core.errors import ConfigError, PiperError, ProgramError
from piper_core.ir.dag import Dag
from piper_core.ir.filter import Filter, Value
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy, base_dag, load
from piper_core.schedule.compile import Compiled, compile_program
from piper_core.schedule.lower import lower
from piper_core.schedule.plan_text import format_plan
from piper_core.schedule.verify import verify
from profiler import console
from profiler.spec import Cluster, load_cluster
from search.cli.show import count, grid_lines, show_grid
from search.header import check_header

if TYPE_CHECKING:
    from search.candidate import Score
    from search.pricing import Pricing

GIB = 2**30
POLL_S = 0.2
"""How often a watched file is looked at."""
MOST_SHOWN = 8
"""Ranks that a note lists."""


@dataclass(slots=True)
class Report:
    """What a check found, as far as it came; None where it did not come. ``ranks`` are those of a row, ``gpus`` those
    of all rows together."""

    nodes: int | None = None
    edges: int | None = None
    actions: int | None = None
    streams: int | None = None
    rows: int | None = None
    ranks: int | None = None
    gpus: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    compile_s: float | None = None
    verify_s: float | None = None
    verified: bool = False
    error: str | None = None
    canonical: bool | None = None
    derived_rows: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    predicted: dict[str, Any] | None = None
    not_priced: str | None = None
    not_by: str | None = None
    changes: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to check a file for: the model that stands in, the cluster to price it on and the strategy to compare it
    with (default: what its header says), and whether to print the ``whole`` plan."""

    synthetic: str | None = None
    stages: int | None = None
    cluster: str | None = None
    against: Path | None = None
    whole: bool = False


def check(path: Path, wanted: Wanted, *, as_json: bool) -> int:
    """Check one file and print the result; return the exit status."""
    report = Report()
    try:
        compiled, words = _checked(path, wanted, report)
    except PiperError as error:
        return console.fail("piper-search", error, as_json=as_json, report=asdict(report))
    plan = compiled.plan
    if as_json:
        more = {"grid": grid_lines(plan), "plan": format_plan(plan)} if wanted.whole else {}
        console.print_json(asdict(report) | more)
        return 0
    print("\n".join([f"{path}: verified", _summary(report), *words, show_grid(plan)]))
    if wanted.whole:
        print(f"\n{format_plan(plan).rstrip()}")
    return 0


def watch(path: Path, wanted: Wanted, *, as_json: bool) -> int:
    """Check a file now and after every save, until Ctrl-C, which is how it ends well: return 0."""
    with suppress(KeyboardInterrupt):
        while True:
            stamp = _stamp(path)
            check(path, wanted, as_json=as_json)
            sys.stdout.flush()
            while (now := _stamp(path)) in (stamp, None):  # None: an editor is replacing it
                time.sleep(POLL_S)
            while (later := _stamp(path)) != now:  # still being written
                now = later
                time.sleep(POLL_S)
            if not as_json:
                print(f"\n--- saved {time.strftime('%H:%M:%S')}")
    return 0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is saved, None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _checked(path: Path, wanted: Wanted, report: Report) -> tuple[Compiled, list[str]]:
    """Return the verified plan, and lines about its price; fill the report."""
    strategy = load(path)
    cluster = check_header(strategy.header)
    if wanted.cluster is not None:
        cluster = load_cluster(wanted.cluster)
    compiled = _verified(strategy, wanted.synthetic, wanted.stages, report)
    if cluster is None:
        report.not_priced = "the header names no cluster"
        if wanted.against is not None:
            raise ConfigError(f"--against needs a price, and {report.not_priced}; give --cluster")
        return compiled, [f"  not priced: {report.not_priced} (--cluster p4de)"]
    return compiled, _priced(strategy, compiled, cluster, wanted, report)


def _priced(strategy: Strategy, compiled: Compiled, cluster: Cluster, wanted: Wanted, report: Report) -> list[str]:
    """Return lines that say the price, and what changed against the parent: another file, or the header."""
    from search.compare import Change, Price
    from search.price import price

    pricing = _pricing(strategy, wanted, report)

    def priced(which: Strategy, made: Compiled) -> Score:
        return price(which, made, cluster).score if pricing is None else pricing.predict(which).score

    score = priced(strategy, compiled)
    report.predicted = score.to_data()
    lines = [f"  {line}" for line in price_lines(score, cluster)]
    lines += [f"  by {pricing}"] if pricing is not None else []
    if report.not_by is not None:
        lines.append(f"  not by what the header names: {report.not_by}")
    if wanted.against is not None:
        other = load(wanted.against)
        made = compile_program(other.program, base_dag(other, synthetic=wanted.synthetic), other.header.world)
        before, name = Price.of(priced(other, made)), str(wanted.against)
    else:
        said = Price.of_header(strategy.header.predicted)
        if said is None or wanted.cluster is not None or report.not_by is not None:
            return lines
        before, name = said, "what the header says"
    change = Change.between(before, Price.of(score))
    report.changes = change.to_data()
    return [*lines, f"  against {name}", *(f"    {line}" for line in change.lines())]


def _pricing(strategy: Strategy, wanted: Wanted, report: Report) -> Pricing | None:
    """Return the profile that the header says the strategy was priced by, where that can be read and no other cluster
    or model is asked for; the report says why not."""
    from search.pricing import said

    if wanted.cluster is not None or wanted.synthetic is not None:
        return None
    try:
        return said(strategy)
    except ConfigError as error:
        report.not_by = str(error)
        return None


def price_lines(score: Score, cluster: Cluster) -> list[str]:
    """Say a price in two lines."""
    peaks = score.peak_memory_bytes
    row = max(range(len(peaks)), key=lambda r: (peaks[r], -r))
    return [
        f"predicted on {cluster.name}: {score.step_time_s:.4g} s a step, {score.tokens_per_s_per_gpu:,.0f} "
        f"tokens/s/GPU, {score.mfu:.1%} MFU, bubble {score.bubble_ratio:.1%}",
        f"memory: {peaks[row] / GIB:.1f} of {cluster.device.memory_bytes / GIB:.1f} GiB on row {row}, the fullest: "
        f"{score.verdict}",
    ]


def _verified(strategy: Strategy, synthetic: str | None, stages: int | None, report: Report) -> Compiled:
    """Return the verified plan of a strategy, and fill the report on the way."""
    program = strategy.program
    report.canonical = program.canonical
    if not program.canonical:
        report.notes.append("directives were put into canonical order")
    if stages is None and (synthetic or strategy.header.model or "").startswith(("dense:", "moe:")):
        stages = _stages_named(program)
        if stages:
            report.notes.append(
                f"{count(stages, 'stage')}: one more than the highest PP named; --stages gives another number"
            )
    base = base_dag(strategy, synthetic=synthetic, stages=stages)
    start_s = time.perf_counter()
    dag = program.apply(base, strategy.header.world)
    report.nodes, report.edges = len(dag), len(dag.edges)
    plan = lower(dag)
    report.compile_s = round(time.perf_counter() - start_s, 6)
    report.actions, report.streams, report.rows = len(plan), len(plan.streams), len(plan.rows)
    report.ranks, report.stages, report.microbatches = len(plan.rows[0]), plan.stages, plan.microbatches
    used = {rank for row in plan.rows for rank in row}
    report.gpus = len(used)
    report.derived_rows = list(plan.derived)
    report.notes += dag.notes
    _matches(strategy.header, dag)
    world = strategy.header.world
    if world is not None and world.size > len(used):
        idle = world.size - len(used)
        some = ", ".join(str(rank) for rank in islice((r for r in range(world.size) if r not in used), MOST_SHOWN))
        report.notes.append(
            f"no placement names {idle:,} of the {world.size:,} ranks: {some}{', ...' if idle > MOST_SHOWN else ''}"
        )
    if plan.derived:
        word = "row" if len(plan.derived) == 1 else "rows"
        every = len(plan.derived) == len(plan.rows)
        rows = "every row" if every else f"{word} {', '.join(map(str, plan.derived))}"
        report.notes.append(f"the list scheduler completed the order of {rows}")
    start_s = time.perf_counter()
    verify(plan)
    report.verify_s = round(time.perf_counter() - start_s, 6)
    report.verified = True
    return Compiled(dag, plan)


def _matches(header: Header, dag: Dag) -> None:
    """Refuse a header that says another microbatch than the directives make.

    Raises:
        ProgramError: naming both.
    """
    made = int(dag.sequences()[dag.compute].max(initial=1))
    if header.micro_batch is not None and header.global_batch is not None and header.micro_batch != made:
        raise ProgramError(
            f"header field micro_batch is {header.micro_batch}, but split and replicate make microbatches of {made}",
            expected=f"micro_batch: {made}, or another split",
        )


def _summary(report: Report) -> str:
    lines = [
        f"{count(report.rows, 'row')} of {count(report.ranks, 'rank')}, {count(report.stages, 'stage')}, "
        f"{count(report.microbatches, 'microbatch', 'es')}",
        f"{count(report.nodes, 'node')} and {count(report.edges, 'edge')} became {count(report.actions, 'action')} "
        f"on {count(report.streams, 'stream')}",
        f"compiled in {report.compile_s:.4f} s, verified in {report.verify_s:.4f} s",
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n".join(f"  {line}" for line in lines)


def _stages_named(program: Program) -> int | None:
    """Return how many stages a program that cuts none itself speaks of; None where it names none."""
    if any(isinstance(directive, Stage) for directive in program.directives):
        return None
    highest = max(_named(program), default=-1)
    return highest + 1 if highest >= 0 else None


def _named(program: Program) -> Iterator[int]:
    for directive in program.directives:
        filters: list[Filter] = []
        if isinstance(directive, Order):
            filters += [each for group in directive.filters for each in group]
            yield from (action.stage for _, slots in directive.actions for slot in slots for action in slot)
        elif isinstance(only := getattr(directive, "filter", None), Filter):
            filters.append(only)
        yield from (_highest(value) for each in filters for tag, value in each.items if tag == "PP")


def _highest(value: Value) -> int:
    """Return the highest index that a filter's value names, -1 for none."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return max(map(int, value))
    last = value.rpartition("-")[2]
    return int(last) if last.isdecimal() else -1
