"""``piper-search report``: one page about what a search found, from the folder that it wrote."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from profiler.console import Parser, path


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", type=path, metavar="DIR", help="the --out folder of a search")
    parser.add_argument("-o", dest="page", type=path, metavar="FILE", help="the page (default: DIR/report.html)")


def run(options: Namespace) -> int:
    """Write the page; return the exit status.

    Raises:
        ConfigError, PiperError: a folder without a search's files, or with files that do not belong together.
    """
    from piper_core.program.write import replace_file
    from profiler import console
    from search.report.folder import read_folder
    from search.report.html import html_report

    found = read_folder(options.folder)
    page: Path = options.page or options.folder / "report.html"
    replace_file(page, html_report(found.result, found.best, found.text))
    if options.json:
        console.print_json({"report": str(page)})
    else:
        print(f"written: {page}")
    return 0
