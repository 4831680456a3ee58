"""``piper-search export``: write a strategy as files of another system, and say what that system cannot express."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from profiler.console import Parser, path
from search.export import EXPORTERS

NOTES = "NOTES.txt"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("file", type=path, metavar="FILE", help="a strategy file")
    parser.add_argument("--to", required=True, choices=tuple(EXPORTERS), help="the system to write for")
    parser.add_argument("-o", dest="folder", type=path, metavar="DIR", help="folder to write to (default: FILE.TARGET)")


def run(options: Namespace) -> int:
    """Write the files and print their names with the notes; return the exit status."""
    from piper_core.errors import ConfigError
    from piper_core.program.strategy import load
    from piper_core.program.write import replace_file
    from profiler import console
    from search.export import exporter
    from search.export.job import job_of
    from search.header import check_header

    folder: Path = options.folder or options.file.with_name(f"{options.file.name.split('.')[0]}.{options.to}")
    strategy = load(options.file)
    check_header(strategy.header)
    made = exporter(options.to)(job_of(strategy))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-o {folder} cannot be made: {error.strerror}; name another folder") from None
    lines = [f"{options.file.name} for {options.to}", "", "How to use it", *(f"- {note}" for note in made.notes)]
    lines += ["", "What it cannot express" if made.lost else "Nothing of the strategy is lost."]
    lines += [f"- {what}" for what in made.lost]
    files = dict(made.files) | {NOTES: "\n".join(lines) + "\n"}
    for name, text in files.items():
        replace_file(folder / name, text)
        if text.startswith("#!"):
            (folder / name).chmod(0o755)
    written = [str(folder / name) for name in files]
    if options.json:
        console.print_json({"target": options.to, "files": written, "lost": made.lost, "notes": made.notes})
        return 0
    for what in made.lost:
        print(f"not expressed: {what}")
    for note in made.notes:
        print(f"note: {note}")
    print(f"written: {', '.join(written)}")
    return 0
