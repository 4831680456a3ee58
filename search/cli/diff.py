"""``piper-search diff``: what two strategies say differently, and what that costs, by cause."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from profiler.console import Parser, path

if TYPE_CHECKING:
    from search.compare import Price


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("before", type=path, metavar="A", help="a strategy file")
    parser.add_argument("after", type=path, metavar="B", help="another, for the same model or not")
    parser.add_argument("--cluster", dest="priced_on", metavar="ID", help="price both on this (default: each header's)")


def run(options: Namespace) -> int:
    """Print the difference; return the exit status: 0 whether they differ or not.

    Raises:
        PiperError: a file that cannot be read, or a strategy that does not run.
    """
    from piper_core.program.strategy import base_dag, load
    from piper_core.schedule.compile import compile_program
    from profiler import console
    from profiler.spec import load_cluster
    from search.compare import Change, Price
    from search.diff import Difference
    from search.header import check_header
    from search.price import price

    strategies = [load(path) for path in (options.before, options.after)]
    found = Difference.between(*strategies)
    prices: list[Price] = []
    for strategy in strategies:
        cluster = check_header(strategy.header)
        if options.priced_on is not None:
            cluster = load_cluster(options.priced_on)
        compiled = compile_program(strategy.program, base_dag(strategy), strategy.header.world)
        if cluster is not None:
            prices.append(Price.of(price(strategy, compiled, cluster).score))
    change = Change.between(*prices) if len(prices) == 2 else None
    if options.json:
        data: dict[str, Any] = found.to_data()
        data["prices"] = [{"step_time_s": each.step_time_s, "memory_bytes": each.memory_bytes} for each in prices]
        console.print_json(data | {"change": change.to_data() if change else None})
        return 0
    lines = list(found.lines()) or ["no directive and no header field differs"]
    print("\n".join(lines))
    if change is None:
        print("not priced: a header names no cluster (--cluster p4de)")
    else:
        print(f"\n{_table(*prices)}\n" + "\n".join(change.lines()))
    return 0


def _table(before: Price, after: Price) -> str:
    """Return both prices by cause."""
    from profiler import console
    from search.compare import GIB

    rows: list[tuple[str, ...]] = [_row("step time, s", before.step_time_s, after.step_time_s, 1.0)]
    for name in dict.fromkeys((*before.time_s, *after.time_s)):
        rows.append(_row(f"  {name.replace('_', ' ')}", before.time_s.get(name, 0), after.time_s.get(name, 0), 1.0))
    rows.append(_row("fullest row, GiB", before.memory_bytes, after.memory_bytes, GIB))
    for name in dict.fromkeys((*before.memory, *after.memory)):
        rows.append(_row(f"  {name.replace('_', ' ')}", before.memory.get(name, 0), after.memory.get(name, 0), GIB))
    return console.table(("", "A", "B", "difference"), rows)


def _row(name: str, before: float, after: float, unit: float) -> tuple[str, ...]:
    a, b = before / unit, after / unit
    return name, f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}" if round(b - a, 3) else ""
