"""What the commands share: options, tables, JSON, and errors that are one line, last on stderr."""

from __future__ import annotations

import errno
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from piper_core.errors import ConfigError, InfeasibleError, PiperError, PlanError

BUG, REJECTED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: a fault of ours; input that is refused; Ctrl-C; and, as after SIGPIPE, nobody left to read."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says that takes no more."""


class Parser(ArgumentParser):
    """Parser of a command's options. ``set_defaults(run=f)`` gives a (sub-)command: f takes the parsed options and
    returns an exit status.

    The standard library's parser starts within 5 ms; typer, which imports pydantic, takes 200 (both measured).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def at_least_one(text: str) -> int:
    """Read an option that counts something, in ASCII digits."""
    value = int(text) if re.fullmatch("[0-9]{1,10}", text) else 0
    if not 1 <= value < 2**31:
        raise ArgumentTypeError(f"must be an integer of at least 1, found {text[:40]!r}")
    return value


def integer(text: str) -> int:
    """Read an option that is any integer, in ASCII digits."""
    if not re.fullmatch("[-+]?[0-9]{1,18}", text):
        raise ArgumentTypeError(f"must be an integer, found {text[:40]!r}")
    return int(text)


def seed(text: str) -> int:
    """Read an option that generators of random numbers start from: 32 bits, which all of them take."""
    value = integer(text)
    if not 0 <= value < 2**32:
        raise ArgumentTypeError(f"must be an integer from 0 to {2**32 - 1}, found {text[:40]!r}")
    return value


def path(text: str) -> Path:
    """Read an option that names a file or a folder: an empty one would be the folder that one is in."""
    if not text:
        raise ArgumentTypeError("must name a file or a folder, found ''; . is the folder that you are in")
    return Path(text)


def duration_s(text: str) -> float:
    """Read an option in seconds: ``30``, ``2.5``, ``30s``, ``2m`` or ``1h``."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(s|m|h)?", text)
    value = float(match[1]) * {None: 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else -1.0
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f"must be a positive number of seconds, found {text[:40]!r}")
    return value


def gib(text: str) -> float:
    """Read an option in GiB: ``40`` or ``39.5``."""
    value = float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,9})?", text) else -1.0
    if value <= 0:
        raise ArgumentTypeError(f"must be a positive number of GiB, found {text[:40]!r}")
    return value


def run(name: str, build: Callable[[], Parser], arguments: Sequence[str]) -> int:
    """Run the command whose parser ``build`` returns; return its exit status.

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
    except OSError as error:
        if error.errno not in FULL:
            return _bug(name, error)
        _to_nowhere(sys.stdout)
        return _end(name, f"cannot write the output: {error.strerror}", REJECTED)
    except Exception as error:
        return _bug(name, error)


def _bug(name: str, error: Exception) -> int:
    """Report a fault of ours; PIPER_TRACEBACK raises it instead."""
    if os.environ.get("PIPER_TRACEBACK"):
        raise error
    return _end(name, f"{type(error).__name__}: {error}; PIPER_TRACEBACK=1 shows where it happened", BUG)


def _invoke(name: str, build: Callable[[], Parser], arguments: Sequence[str]) -> int:
    try:
        options = build().parse_args(arguments)
        return int(options.run(options))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except PiperError as error:
        return fail(name, error, as_json="--json" in arguments)


def fail(name: str, error: PiperError, *, as_json: bool = False, report: Mapping[str, Any] | None = None) -> int:
    """Print what shows the error on stdout (its context, or ``report`` as JSON), then the error, last on stderr."""
    found = {"reason": error.reason, "context": error.context} if isinstance(error, PlanError) else {}
    if isinstance(error, InfeasibleError) and error.context:
        found = {"context": error.context}
    try:
        if as_json:
            print_json({**(report or {}), "error": str(error), **found})
        elif found:
            print(found["context"])
        _flush(sys.stdout)
    except BrokenPipeError:
        _to_nowhere(sys.stdout)
    return _end(name, str(error), REJECTED)


def warn(name: str, text: str) -> None:
    """Print a line on stderr about something that goes on without."""
    print(f"{name}: warning: {' '.join(text.split())}", file=sys.stderr)


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


def plain(stream: TextIO | None) -> bool:
    """Return whether a stream takes text alone, without colours, bold type or anything that moves: it is no terminal,
    or the person wants none (NO_COLOR) or cannot have any (TERM=dumb)."""
    unwanted = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return unwanted or stream is None or not stream.isatty()


def _end(name: str, text: str, status: int) -> int:
    with suppress(OSError, ValueError):  # nobody reads, or a full disk
        print(f"{name}: error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return status


def _flush(stream: TextIO | None) -> None:
    if stream is not None:  # closed by the shell
        stream.flush()


def _to_nowhere(stream: TextIO | None) -> None:
    """Send what is left of a stream to nowhere, so that the interpreter's own flush at exit is quiet."""
    if stream is None:
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
