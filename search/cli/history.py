"""``piper-search history``: measured steps beside what was predicted of them, over time."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from profiler import console
from profiler.console import Parser


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("of_profile", nargs="?", type=Path, metavar="PROFILE",
                        help="a profile with runs (default: all of the store)")  # fmt: skip
    parser.add_argument("--store", dest="of_store", type=Path, metavar="FOLDER", help="the store (default: your own)")


def run(options: Namespace) -> int:
    """Print; return the exit status."""
    from profiler.store import folder, profiles
    from search.history import history, lines

    paths = [options.of_profile] if options.of_profile is not None else profiles(options.of_store)
    found = [each for path in paths if (each := history(path)).rows or options.of_profile is not None]
    if options.json:
        console.print_json([each.to_data() for each in found])
        return 0
    if not found:
        print(f"no measured run in {options.of_store or folder()}; runs are kept there as they are measured")
    for each in found:
        print("\n".join(lines(each)))
    return 0
