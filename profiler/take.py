"""Take a profile: plan, measure within the budget, say what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from piper_core.arch.huggingface import load_architecture
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from profiler import console
from profiler.fingerprint import conditions, machine
from profiler.store import ENDING, check_writable, model_digest, place

if TYPE_CHECKING:
    from profiler.measure.chunks import Subject
    from profiler.measure.sitting import Report, Sitting

DEFAULT_BUDGET_S = 300.0
LEAST_BUDGET_S = 1.0
"""Loading torch and tracing one chunk take longer."""
DEFAULT_SEQ_LEN = 4096


def take(
    *, model: str, device: str | None, tp: tuple[int, ...] | None, ep: tuple[int, ...] | None,
    cp: tuple[int, ...] | None, micro_batch: tuple[int, ...] | None, seq_len: int | None, dtype: str | None,
    collectives: bool | None, budget: float | None, store: Path | None, dry_run: bool | None, threads: int | None,
    priority: bool | None, ranks: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Measure a model and keep it; return the exit status.

    Raises:
        ConfigError: no such model or device, a degree that the model does not allow, a store that cannot be joined, a
            budget too small to measure anything.
    """
    began = perf_counter()
    budget_s = budget or DEFAULT_BUDGET_S
    if budget_s < LEAST_BUDGET_S:
        raise ConfigError(
            f"--budget {budget_s:g} s is too small to measure anything: {LEAST_BUDGET_S:g} s at least, a minute for a "
            "small model; --dry-run says what a model takes"
        )
    architecture, kind = load_architecture(model), device or "cpu"
    here = machine(kind, threads or 1)  # refuses a device that is not there, before torch is imported
    length = seq_len or min(DEFAULT_SEQ_LEN, architecture.max_seq)
    if length > architecture.max_seq:
        raise ConfigError(f"--seq-len {length} is longer than {model} allows: at most {architecture.max_seq}")
    kept_as = dtype or dtype_on(kind)
    target = _target(store, here, architecture, kept_as)
    if not dry_run:
        check_writable(target)
    sitting = _sitting(
        architecture, kind, target, length, ranks, dtype=kept_as, tp=tp, ep=ep, cp=cp, micro_batch=micro_batch,
        transfers=here.count if collectives else ranks or 0, threads=threads or 1, priority=bool(priority),
    )  # fmt: skip
    now = conditions(kind)
    if now.busy:
        print(f"piper-profile: warning: {now.load:.1f} processes a core run here; times may be off", file=sys.stderr)
    with _progress(hidden=as_json) as report:
        report("tracing", 0, 1)
        traced = sitting.trace()
        if dry_run:
            return _plan(sitting, traced, perf_counter() - began, budget_s, target, as_json=as_json)
        try:
            found = sitting.run(traced, began + budget_s, report)
        except KeyboardInterrupt:
            print(f"piper-profile: kept what was measured: {target}", file=sys.stderr)
            raise
    missing = sitting.missing(traced)
    data = {
        "profile": str(target), "machine": str(found.machine), "chunks": len(found.chunks), "sites": len(found.sites),
        "transfers": len(found.transfers), "missing": len(missing), "noisy": found.noisy,
        "failed": [str(site) for site, each in found.by_site.items() if each.failed],
        "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip
    if as_json:
        console.print_json(data)
        return 0
    print(f"{architecture.name} on {found.machine}")
    print(
        f"{data['chunks']} distinct chunks at {data['sites']} sites, {data['transfers']} transfers, "
        f"in {data['seconds']} s; {len(missing)} of this budget's chunks left: run again to go on"
        if missing
        else f"{data['chunks']} distinct chunks at {data['sites']} sites, {data['transfers']} transfers, "
        f"in {data['seconds']} s"
    )
    if found.noisy:
        print(
            f"wide: {len(found.noisy)} medians are uncertain by more than 10 %, such as {found.noisy[0]}; measure on a "
            "quieter machine, or with --priority"
        )
    for site in data["failed"][:3]:  # type: ignore[index]  # a list
        print(f"out of memory: {site}")
    print(f"written: {target} (piper-profile show {target})")
    return 0


def measured(
    architecture: Architecture, device: str, *, seq_len: int, ranks: int, micro_batch: tuple[int, ...], threads: int,
    budget_s: float, hidden: bool,
) -> Path:  # fmt: skip
    """Measure a model on this machine for a search over ``ranks``, and return where the store has it.

    Raises:
        ConfigError: no such device, a store that cannot be written to, or a budget too small to measure anything.
    """
    began = perf_counter()
    dtype = dtype_on(device)
    target = place(machine(device, threads), architecture.name, model_digest(architecture), dtype)
    check_writable(target)
    sitting = _sitting(architecture, device, target, seq_len, ranks, dtype=dtype, transfers=ranks, threads=threads,
                       micro_batch=micro_batch)  # fmt: skip
    with _progress(hidden=hidden) as report:
        report("tracing", 0, 1)
        sitting.run(sitting.trace(), began + budget_s, report)
    return target


def dtype_on(device: str) -> str:
    """Return the dtype that a device is measured in where nothing is said: what ``run`` trains in there."""
    return "float32" if device == "cpu" else "bfloat16"


def _sitting(
    architecture: Architecture, device: str, target: Path, seq_len: int, ranks: int | None, *, dtype: str,
    transfers: int, threads: int, priority: bool = False, tp: tuple[int, ...] | None = None,
    ep: tuple[int, ...] | None = None, cp: tuple[int, ...] | None = None, micro_batch: tuple[int, ...] | None = None,
) -> Sitting:  # fmt: skip
    """Return a sitting that measures what was asked for, or what a search over ``ranks`` may ask for."""
    from profiler.measure.chunks import legal, shapes
    from profiler.measure.sitting import Sitting, Wanted

    more = legal(architecture, seq_len, ranks) if ranks else {"tensor": [1], "expert": [1]}
    asked = shapes(
        architecture, seq_len, tensor=tp or more["tensor"], expert=ep or more["expert"], context=cp or (1,),
        micro_batch=micro_batch or (1, 2, 4),
    )  # fmt: skip
    return Sitting(architecture, Wanted(tuple(asked), device, dtype, transfers, threads, priority), target)


def _target(store: Path | None, here: object, architecture: Architecture, dtype: str) -> Path:
    from profiler.fingerprint import Machine

    assert isinstance(here, Machine)
    if store is not None and store.suffix == ".json":
        if not store.name.endswith(ENDING) and store.exists():
            raise ConfigError(f"--store {store}: a profile's name ends in {ENDING}, and this file is another")
        return store
    return place(here, architecture.name, model_digest(architecture), dtype, store)


def _plan(
    sitting: Sitting, traced: list[Subject], tracing_s: float, budget_s: float, target: Path, *, as_json: bool
) -> int:
    """Say what would be measured, and how long that takes at most."""
    from profiler.measure.sitting import OVERHEAD

    missing = sitting.missing(traced)
    left = max(0.0, budget_s - tracing_s - sitting.fixed_s())
    each = sitting.effort(left, len(missing)).seconds
    chunks_s = each * OVERHEAD * len(missing)
    data = {
        "profile": str(target), "shapes": len(sitting.wanted.shapes), "chunks": len(traced),
        "sites": sum(len(s.sites) for s in traced), "to_measure": len(missing), "each_s": round(each, 3),
        "tracing_s": round(tracing_s, 1), "chunks_s": round(chunks_s, 1), "rest_s": round(sitting.fixed_s(), 1),
        "at_most_s": round(tracing_s + chunks_s + sitting.fixed_s(), 1), "budget_s": budget_s,
    }  # fmt: skip
    if as_json:
        console.print_json(data)
        return 0
    print(
        f"shapes: {data['shapes']}, {data['chunks']} distinct chunks at {data['sites']} sites, {data['to_measure']} to "
        f"measure at {each:.2g} s each\ntracing {data['tracing_s']} s, chunks {data['chunks_s']} s, optimiser and "
        f"transfers {data['rest_s']} s: {data['at_most_s']} s of a budget of {budget_s:g} s\nto be written: {target}"
    )
    return 0


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Report]:
    """Show a bar on stderr, where stderr is a terminal that may show what moves."""
    if hidden or console.plain(sys.stderr):
        yield lambda text, done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, done, count: bar.update(task, completed=done, total=max(1, count), description=text)
