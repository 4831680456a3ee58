"""The main command: search, print, write the winner."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from piper_core.arch.huggingface import load_architecture
from piper_core.errors import ConfigError
from profiler import console
from profiler.spec import Cluster, load_cluster
from search.calibrate import recalibrate
from search.cli.choose_profile import choose_profile
from search.cli.outcome import Outcome
from search.database import Database
from search.engine import Problem, Result
from search.front import find
from search.generators.sampled import JOURNAL
from search.objective import Objective
from search.profiled import use_profile
from search.report.folder import check_same_search, write_folder
from search.shortfall import NothingFitsError
from search.space import Space, parse_fix

if TYPE_CHECKING:
    from collections.abc import Callable

    from search.execute import Execution
    from search.generators.base import Generator

DEFAULT_OUT = Path("piper-search-out")
DEFAULT_BUDGET_S = 12.0
USUAL_SEQ_LEN = 4096


def run_search(
    *,
    model: str,
    gpus: int,
    cluster: str = "p4de",
    global_batch: int = 512,
    seq_len: int | None = None,
    fix: list[str],
    forbid: list[str],
    top: int = 10,
    json: bool = False,
    out: Path | None = None,
    resume: Path | None = None,
    seed: int = 0,
    budget: float | None = None,
    max_memory_gib: float | None = None,
    objective: Objective = "throughput",
    workers: int | None = None,
    explain: Sequence[str] = (),
    execute: int | None = None,
    profile: str | None = None,
    address: str | None = None,
) -> int:
    """Search, print the best strategies, and write ``best.strategy.yaml``; return the exit status: 0, and after Ctrl-C
    too where something that fits has been found (the table says "interrupted"); else Ctrl-C ends the command with 130.

    ``seed`` is for Optuna, which tries finer choices of the best; branch and bound uses no chance. ``resume`` goes on
    in the folder of an earlier run with what that evaluated. ``profile`` is what to price with (see
    :func:`search.cli.choose_profile.choose_profile`).

    Raises:
        ConfigError, InfeasibleError: one line that says what is wrong or short.
    """
    architecture, hardware = load_architecture(model), load_cluster(cluster)
    fixed, forbidden = parse_fix(fix), parse_fix(forbid, "--forbid")
    if resume is not None and out is not None:
        raise ConfigError("--resume names the folder of a search, which is written to; leave --out out")
    if max_memory_gib is not None:
        hardware = with_memory(hardware, max_memory_gib)
    seq_len = min(USUAL_SEQ_LEN, architecture.max_seq) if seq_len is None else seq_len
    if seq_len > architecture.max_seq:
        raise ConfigError(f"--seq-len {seq_len} is longer than {model} allows: at most {architecture.max_seq}")
    space = Space(architecture, gpus, hardware.gpus_per_node, global_batch, seq_len, fixed, forbidden)
    space.check()
    target = resume or out or DEFAULT_OUT
    searched = {
        "model": architecture.name, "cluster": cluster, "gpus": gpus, "global_batch": global_batch, "seq_len": seq_len,
        "fix": {name: list(values) for name, values in fixed.items()},
        "forbid": {name: list(values) for name, values in forbidden.items()},
        "memory_bytes": hardware.device.memory_bytes, "objective": objective, "seed": seed,
    }  # fmt: skip
    _check_folder(target, "--out" if resume is None else "--resume")
    if out is not None:  # the default folder holds the last search, whatever it was
        check_same_search(target, searched)
    problem = Problem(architecture, hardware, gpus, global_batch, seq_len)
    pricing = choose_profile(profile, architecture, hardware, gpus, (global_batch, seq_len), hidden=json)
    if pricing is not None:
        use_profile(problem, pricing.profile, f"--profile {pricing.path}")
        searched["profile"] = str(pricing.path)
    key = searched | {"architecture": repr(architecture), "hardware": repr(hardware)}
    key["version"] = version("piper-search")
    if pricing is not None:
        key["profile"] = pricing.costs_digest
    if resume is not None:
        database = Database.resume(target, key)
    else:
        database = Database.start(target, key, replace=out is None)
    try:
        with _progress(hidden=json) as update:
            result = find(
                problem, space, top=top, budget_s=budget or DEFAULT_BUDGET_S, progress=update, objective=objective,
                database=database, seed=seed, journal=target / JOURNAL, workers=workers, address=address,
            )  # fmt: skip
    except NothingFitsError as error:
        from search.conflict import explain as conflicts

        error.context = conflicts(problem, space)
        raise
    outcome = Outcome(problem, space, result, cluster, pricing)
    if pricing is not None and pricing.calibration is not None:
        outcome.ranked = recalibrate(result, pricing.calibration)
    if execute != 0:
        outcome.execution = _execute(outcome, execute, address, hidden=json)
    data = outcome.to_data(seed, target)
    names = write_folder(target, outcome.strategy(outcome.winner), data | {"search": searched})
    if json:
        data["candidates"] = data["candidates"][:top]
        data["proved"] = min(data["proved"], top)
        data["pareto"] = [rank for rank in data["pareto"] if rank < top]
        console.print_json(data)
    else:
        outcome.show(top, target, names)
    for choice in explain:
        from search.conflict import why_not

        best = result.best.score if outcome.ranked is None else problem.score(result.best.config)
        print(why_not(problem, space, choice, best), file=sys.stderr if json else sys.stdout)
    return 0


def _execute(outcome: Outcome, k: int | None, address: str | None, *, hidden: bool) -> Execution:
    """Execute the best candidates, ``k`` of them (None: as many as is usual, on this machine)."""
    from search.execute import DEFAULT, Execution, execute

    if outcome.result.stopped == "interrupted":
        return Execution(reason="the search was interrupted")
    say = (lambda text: None) if hidden or console.plain(sys.stderr) else (lambda text: print(text, file=sys.stderr))
    strategies = [outcome.strategy(rank) for rank in range(min(k or DEFAULT, len(outcome.result.candidates)))]
    return execute(strategies, outcome.problem.architecture, k, address=address if k else None, say=say)


def with_memory(cluster: Cluster, memory_gib: float) -> Cluster:
    """Return a cluster of which no more memory of a GPU may be used.

    Raises:
        ConfigError: it has less.
    """
    has = cluster.device.memory_bytes / 2**30
    if memory_gib > has:
        raise ConfigError(f"--max-memory {memory_gib:g} is more than one {cluster.device.name} has: {has:.1f} at most")
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_gib * 2**30))


def _check_folder(folder: Path, option: str) -> None:
    """Refuse an output folder, which an option named, that cannot be made or written to; make nothing yet.

    Raises:
        ConfigError: with the reason.
    """
    import os

    nearest = folder
    try:
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"{option} {folder} cannot be made: {nearest} is no folder; name another one")
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made: {error.strerror}; name another folder") from None
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} is not writable; name another folder")


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[Result, Generator], None] | None]:
    """Show a bar on stderr while a search runs, where stderr is a terminal that may show what moves."""
    if hidden or console.plain(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from search.report.table import step_s

    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("bounding the space", total=1.0)

        def update(result: Result, generator: Generator) -> None:
            best = f"best {step_s(result.best.score.step_time_s)} s" if result.candidates else "nothing fits yet"
            least = generator.bound()
            known = result.candidates[-1].score.step_time_s if result.candidates else 0.0
            done = min(1.0, least / known) if known else 0.0
            text = f"{best}, {result.simulated} simulated of {result.size:,}, least bound left {step_s(least)} s"
            bar.update(task, completed=done, description=text)

        yield update
