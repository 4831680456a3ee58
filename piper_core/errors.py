"""The errors that bad input raises: each is one line that says what, where, what was expected, what would do."""

from __future__ import annotations


class PiperError(Exception):
    """Base of every error that a user's input can cause; ``str()`` is one line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class DirectiveError(PiperError):
    """A directive that is malformed or that does not apply to the DAG it met.

    ``where`` is the position ("directive 4 of 11, order(...)") and may be filled in later by the program
    that owns the directive; ``expected``, ``found`` and ``hint`` complete the line.
    """

    def __init__(self, what: str, *, expected: str = "", found: str = "", hint: str = "", where: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.hint, self.where = what, expected, found, hint, where

    def at(self, where: str) -> DirectiveError:
        """Return the same error with its position filled in, unless it already has one."""
        if self.where:
            return self
        kind = type(self)
        return kind(self.what, expected=self.expected, found=self.found, hint=self.hint, where=where)

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.found:
            parts.append(f"found {self.found}")
        line = ", ".join(parts)
        return " ".join(f"{line}; {self.hint}".split() if self.hint else line.split())


class ProgramError(DirectiveError):
    """A strategy file that cannot be read as a program: syntax, size, nesting, duplicate keys, header fields."""


class ScheduleError(DirectiveError):
    """A schedule that is not defined for the degrees asked, with the nearest ones that are."""


class PlanError(PiperError):
    """A plan that cannot run as written.

    ``reason`` is a stable word (``deadlock``, ``mispaired``, ``incomplete``, ``duplicate``, ``use_after_free``,
    ``leak``, ``collective_order``, ``data_dependency``); ``context`` is at most ten lines of the grid with
    ``<-- here`` on the action to look at, printed before the one-line error.
    """

    def __init__(self, reason: str, what: str, *, context: str = "") -> None:
        super().__init__(f"{reason}: {what}")
        self.reason, self.what, self.context = reason, what, context


class InfeasibleError(PiperError):
    """A legal strategy that cannot fit or cannot be scheduled within a limit; the text says by how much.

    ``context`` is lines about what conflicts and what would help, printed before the one-line error.
    """

    def __init__(self, what: str, *, context: str = "") -> None:
        super().__init__(what)
        self.context = context


class ConfigError(PiperError):
    """A command-line option, model, cluster or hardware file that is unknown or out of range."""


class RunError(PiperError):
    """A run that ended before its end: ``rank`` (None: not one alone), the ``action`` it was at, and the cause."""

    def __init__(self, what: str, *, rank: int | None = None, action: str = "", also: str = "") -> None:
        self.what, self.rank, self.action, self.also = what, rank, action, also
        where = "" if rank is None else f"rank {rank}" + (f" at {action}" if action else "") + ": "
        super().__init__(f"{where}{what}" + (f"; {also}" if also else ""))
