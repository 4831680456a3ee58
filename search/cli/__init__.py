"""``piper-search``: the search, and commands that show and check strategies."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-search``; return its exit status (see :mod:`profiler.console`)."""
    from profiler import console
    from search.cli.app import parser

    atexit.register(gc.freeze)  # nobody goes through all that was searched once more, which takes most of a second
    return console.run("piper-search", parser, sys.argv[1:] if arguments is None else arguments)
