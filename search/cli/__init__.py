"""``piper-search``: the search, and commands that show and check strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-search``; return its exit status (see :mod:`profiler.console`)."""
    from profiler import console

    words = sys.argv[1:] if arguments is None else arguments
    return console.run("piper-search", _app, _spread(words))


def _app() -> typer.Typer:
    from search.cli.app import app

    return app


def _spread(words: Sequence[str]) -> list[str]:
    """Give each of ``--fix pp=4 tp=2`` its own ``--fix``: a parser of options takes one value a time."""
    out: list[str] = []
    fixing = False
    for word in words:
        fixing = fixing and "=" in word and not word.startswith("-")
        if fixing and out[-1] != "--fix":
            out.append("--fix")
        out.append(word)
        fixing = fixing or word == "--fix"
    return out
