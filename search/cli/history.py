"""``piper-search history``: measured steps beside what was predicted of them, over time."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path

from piper_core.errors import ConfigError
from profiler import console
from profiler.console import Parser, path


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("of_profile", nargs="?", type=path, metavar="PROFILE",
                        help="a profile with runs (default: all of the store)")  # fmt: skip
    parser.add_argument("--store", dest="of_store", type=path, metavar="FOLDER", help="the store (default: your own)")


def run(options: Namespace) -> int:
    """Print; return the exit status.

    Raises:
        ConfigError: no such folder, or the profile that was named cannot be read.
    """
    from profiler.store import folder, load, load_all, profiles
    from search.history import history, lines

    store: Path | None = options.of_store
    if store is not None and not store.is_dir():
        raise ConfigError(f"--store {store}: no such folder; without it your own store is shown, {folder()}")
    if options.of_profile is not None:
        found = [history(options.of_profile, load(options.of_profile))]
    else:
        read = load_all(profiles(store), partial(console.warn, "piper-search"))
        found = [history(path, profile) for path, profile in read if profile.runs]
    if options.json:
        console.print_json([each.to_data() for each in found])
        return 0
    if not found:
        print(f"no measured run in {store or folder()}; runs are kept there as they are measured")
    for each in found:
        print("\n".join(lines(each)))
    return 0
