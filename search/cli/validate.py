"""``piper-search validate``: predict the published measurements that the package carries, and say how near it comes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from piper_core.errors import ConfigError
from profiler import console
from profiler.console import Parser, path

SUFFIXES = (".svg", ".html")


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--leave-one-out", action="store_true",
                        help="refit the constants without each source in turn (a minute more)")  # fmt: skip
    parser.add_argument("--out", dest="picture", type=path, metavar="FILE",
                        help="draw predicted against measured (.svg, .html)")  # fmt: skip


def run(options: Namespace) -> int:
    """Predict, score and print; return the exit status.

    Raises:
        ConfigError: a picture of another kind; ProgramError: it cannot be written.
    """
    from piper_core.program.write import replace_file
    from search.validation import report
    from search.validation.leave_out import leave_one_out
    from search.validation.validate import validate

    target: Path | None = options.picture
    if target is not None and target.suffix not in SUFFIXES:
        raise ConfigError(
            f"--out {target}: the picture is {' or '.join(SUFFIXES)}, found {target.suffix or 'no ending'}"
        )
    found = validate()
    left_out = leave_one_out() if options.leave_one_out else []
    if target is not None:
        drawn = report.picture([*found.pairs, *found.elsewhere, *found.small])
        replace_file(target, drawn if target.suffix == ".svg" else _page(drawn))
    if options.json:
        console.print_json(report.to_data(found, left_out))
        return 0
    print(report.text(found, left_out))
    if target is not None:
        print(f"written: {target}")
    return 0


def _page(drawn: str) -> str:
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Predicted against measured</title>'
    return f"{head}\n{drawn}</html>\n"
