"""What the commands share: tables, JSON, and errors that are one line, last on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from piper_core.errors import ConfigError, PiperError, PlanError

if TYPE_CHECKING:
    import typer

BUG, REJECTED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: a fault of ours; input that is refused; Ctrl-C; and, as after SIGPIPE, nobody left to read."""


def run(name: str, build: Callable[[], typer.Typer], arguments: Sequence[str]) -> int:
    """Run the command that ``build`` returns; return its exit status.

    Whatever goes wrong ends in one line ``NAME: error: ...``, the last on stderr, and no traceback; the
    environment variable PIPER_TRACEBACK shows that of a fault of ours.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        status = _invoke(name, build, arguments)
        _flush(sys.stdout)
        return status
    except KeyboardInterrupt:
        return _end(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _to_nowhere(sys.stdout)
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get("PIPER_TRACEBACK"):
            raise
        text = f"{type(error).__name__}: {error}; PIPER_TRACEBACK=1 shows where it happened"
        return _end(name, text, BUG)


def _invoke(name: str, build: Callable[[], typer.Typer], arguments: Sequence[str]) -> int:
    import typer
    from typer.main import get_command

    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer does not name the base of its errors
    as_json = "--json" in arguments
    command = get_command(build())
    try:
        # The steps of typer's own main, which would print errors on more than one line.
        with command.make_context(name, list(arguments)) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except usage_error as error:
        return fail(name, _usage(error, name), as_json=as_json)
    except PiperError as error:
        return fail(name, error, as_json=as_json)


def _usage(error: Any, name: str) -> ConfigError:
    text = error.format_message().strip().rstrip(".")
    return ConfigError(f"{text}; see {error.ctx.command_path if error.ctx else name} --help")


def fail(name: str, error: PiperError, *, as_json: bool = False, report: Mapping[str, Any] | None = None) -> int:
    """Print what shows the error on stdout (its context, or ``report`` as JSON), then the error, last on stderr."""
    found = {"reason": error.reason, "context": error.context} if isinstance(error, PlanError) else {}
    try:
        if as_json:
            print_json({"verified": False, **(report or {}), "error": str(error), **found})
        elif found:
            print(found["context"])
        _flush(sys.stdout)
    except BrokenPipeError:
        _to_nowhere(sys.stdout)
    return _end(name, str(error), REJECTED)


def print_json(data: object) -> None:
    """Print data as JSON on stdout."""
    import json

    print(json.dumps(data, indent=1))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned columns, those of numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    made = []
    for title, *cells in columns:
        width = max(map(len, (title, *cells)))
        right = all(cell[:1].isdigit() for cell in cells)
        made.append([cell.rjust(width) if right else cell.ljust(width) for cell in (title, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*made, strict=True))


def _end(name: str, text: str, status: int) -> int:
    with suppress(BrokenPipeError):
        print(f"{name}: error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return status


def _flush(stream: TextIO | None) -> None:
    if stream is not None:  # closed by the shell
        stream.flush()


def _to_nowhere(stream: TextIO) -> None:
    """Send what is left of a stream to nowhere, so that the interpreter's own flush at exit is quiet."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
