"""``piper-search refine``: improve a strategy in all that is not locked; comments and the order of keys stay."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from profiler import console
from profiler.console import Parser, duration_s, path, seed

if TYPE_CHECKING:
    from piper_core.program.strategy import Strategy
    from piper_core.schedule.compile import Compiled
    from profiler.spec import Cluster
    from search.candidate import Score
    from search.pricing import Pricing
    from search.refine.climb import Climb

DEFAULT_BUDGET_S = 30.0
_WORDS = {"budget": "time budget spent", "interrupted": "interrupted", "nothing": "no move that is left gains anything"}


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("file", type=path, metavar="FILE", help="a strategy file with a model and a cluster")
    parser.add_argument("--lock", nargs="+", action="extend", default=[], metavar="WHAT",
                        help="what stays as it is: a field (order, zero, layers, schedule, pp, tp, micro_batch, "
                             "recompute, ...) or a filter (PP=0, PP=1,MB=0-3)")  # fmt: skip
    parser.add_argument("--budget", dest="refine_s", type=duration_s, default=DEFAULT_BUDGET_S, metavar="SECONDS",
                        help="time to refine (default: 30s); Ctrl-C keeps the best so far")  # fmt: skip
    parser.add_argument("--seed", dest="refine_seed", type=seed, default=0, metavar="N",
                        help="in which order moves of the order are tried (default: 0)")  # fmt: skip
    parser.add_argument("--profile", dest="refine_profile", metavar="FILE",
                        help="price with what was measured: a file of piper-profile; auto: this machine's own, taken "
                             "now where there is none; none: nothing measured (default: what the file was priced by, "
                             "else this machine's own)")  # fmt: skip
    parser.add_argument("-o", dest="target", type=path, metavar="FILE", help="where to write (default: NAME.refined.*)")


def run(options: Namespace) -> int:
    """Refine, print what was done, and write the result where it is better; return the exit status.

    Raises:
        ConfigError: no cluster, a lock that is none, or a profile that cannot price this; PiperError: a strategy that
            does not run.
    """
    from piper_core.errors import ConfigError
    from piper_core.program.strategy import base_dag, load
    from piper_core.program.write import replace_file
    from piper_core.schedule.compile import compile_program
    from search.compare import Change, Price
    from search.header import check_header
    from search.price import price
    from search.refine.climb import climb
    from search.refine.lock import Locks
    from search.refine.rewrite import rewritten

    source: Path = options.file
    strategy = load(source)
    cluster = check_header(strategy.header)
    if cluster is None:
        raise ConfigError(f"{source}: the header names no cluster to price it on; add cluster: p4de")
    pricing = _pricing(strategy, cluster, options)
    base = base_dag(strategy) if pricing is None else pricing.base(strategy)
    compiled = compile_program(strategy.program, base, strategy.header.world)
    locks = Locks.of(options.lock, strategy, compiled)

    def score_of(which: Strategy, made: Compiled) -> Score:
        return price(which, made, cluster).score if pricing is None else pricing.score(which, made, cluster)

    before = score_of(strategy, compiled)
    with _progress(hidden=options.json) as update:
        found = climb(strategy, compiled, base, cluster, locks, budget_s=options.refine_s, seed=options.refine_seed,
                      progress=update, score_of=score_of)  # fmt: skip
    target: Path = options.target or source.with_name(f"{source.stem.split('.')[0]}.refined{_ending(source)}")
    by = None if pricing is None else pricing.header()
    if found.done or options.target is not None:
        replace_file(target, rewritten(source, found.strategy, found.score, cluster, by) if found.done
                     else source.read_text(encoding="utf-8"))  # fmt: skip
    change = Change.between(Price.of(before), Price.of(found.score))
    written = str(target) if found.done or options.target is not None else None
    if options.json:
        console.print_json({
            "done": found.done, "tried": found.tried, "illegal": found.illegal, "locked": found.locked,
            "stopped": found.stopped, "predicted": found.score.to_data(), "change": change.to_data(), "file": written,
            "priced_by": by,
        })  # fmt: skip
        return 0
    print("\n".join([*_lines(found, change, written), *([f"by {pricing}"] if pricing is not None else [])]))
    return 0


def _pricing(strategy: Strategy, cluster: Cluster, options: Namespace) -> Pricing | None:
    """Return what to price with: the profile that is named, the one that the file was priced by, or this machine's own;
    None for none."""
    from piper_core.arch.huggingface import load_architecture
    from piper_core.errors import ConfigError
    from search.cli.choose_profile import NONE, choose_profile

    header, named = strategy.header, options.refine_profile
    if named == NONE:
        return None
    if header.model is None or header.model.startswith(("dense:", "moe:")):
        if named is not None:
            raise ConfigError("--profile: a synthetic model cannot have been measured; leave it out")
        return None
    told = header.predicted.get("profile")
    if named is None and isinstance(told, str):
        if Path(told).exists():
            named = told
        else:
            console.warn("piper-search", f"profile {told}, which the file was priced by, is gone: not by that")
    architecture = load_architecture(header.model)
    ranks = header.world.size if header.world else 1
    batch = header.global_batch or 1, header.length(architecture)
    return choose_profile(named, architecture, cluster, ranks, batch, hidden=options.json)


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[Climb], None] | None]:
    """Show the best so far on stderr while a refinement runs, where that is a terminal that may show what moves."""
    if hidden or console.plain(sys.stderr):
        yield None
        return

    def update(found: Climb) -> None:
        print(f"\r\x1b[Krefining: {found.score.step_time_s:.6g} s a step after {len(found.done)} moves, "
              f"{found.tried} priced", end="", file=sys.stderr, flush=True)  # fmt: skip

    try:
        yield update
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _lines(found: Climb, change: object, written: str | None) -> list[str]:
    from search.compare import Change

    assert isinstance(change, Change)
    tried = f"{found.tried:,} priced, {found.illegal:,} do not run, {found.locked:,} locked; {_WORDS[found.stopped]}"
    if not found.done:
        return [f"nothing better was found: {tried}"]
    return [*found.done, *change.lines(), tried, f"written: {written} (piper-search check {written})"]


def _ending(source: Path) -> str:
    return source.suffix if source.suffix in (".json", ".yaml", ".yml") else ".yaml"
