"""``piper-search``: the search, and commands that show and check strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-search``; return its exit status (see :mod:`profiler.console`)."""
    from profiler import console
    from search.cli.app import parser

    return console.run("piper-search", parser, sys.argv[1:] if arguments is None else arguments)
