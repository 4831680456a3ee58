"""What ends a run early: how a worker says it, how the cause is found among all that follows from it, and faults made
on purpose, which tests and drills use."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from piper_core.errors import PiperError, RunError

if TYPE_CHECKING:
    from piper_core.runtime.program import RankProgram

_ECHO = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|timed? ?out|socket|gloo::|nccl|store|peer", re.IGNORECASE
)
"""What the others hear when a rank is gone or does not come."""
NO_ANSWER = "stopped answering"
_FOR_EVER_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Broke:
    """A call of a worker that failed: the action that it was at, and why. ``refused`` is an error of ours, which says
    itself what to do; ``echo`` says that it may only follow from what happened to another rank."""

    rank: int
    action: str
    kind: str
    text: str
    refused: bool = False
    echo: bool = False


def broke(rank: int, action: str, error: BaseException) -> Broke:
    """Return the record of an exception."""
    text = " ".join(str(error).split())[:300]
    ours = isinstance(error, PiperError)
    echo = not ours and isinstance(error, RuntimeError | OSError) and bool(_ECHO.search(text))
    return Broke(rank, action, type(error).__name__, text, ours, echo)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of all ranks when a call has failed: answers that are failures, ranks whose process is gone with
    the reason, the action that each was last seen at, and ranks that do not even say where they are."""

    broken: Sequence[Broke]
    dead: Mapping[int, str]
    at: Mapping[int, str]
    silent: Sequence[int]
    timeout_s: float


def cause(seen: Seen) -> RunError:
    """Return the error that names the rank to blame: one that died, one that failed by itself, one that is silent, one
    that computes where others wait; else what was heard first."""
    for rank, why in sorted(seen.dead.items()):
        return _error(seen, rank, why)
    for each in sorted(seen.broken, key=lambda each: (each.echo, each.rank)):
        if not each.echo:
            kind = "" if each.refused else f"{each.kind}: "
            return RunError(f"{kind}{each.text}", rank=each.rank, action=each.action)
    for rank in seen.silent:
        return _error(seen, rank, f"{NO_ANSWER}; it had {seen.timeout_s:g} s")
    late = [rank for rank, where in seen.at.items() if not where.endswith("(wait)")]
    if late and len(late) < len(seen.at):
        return _error(seen, min(late), f"did not end within {seen.timeout_s:g} s, and the others wait")
    if seen.broken:
        first = seen.broken[0]
        return _error(seen, first.rank, f"{first.kind}: {first.text}")
    return RunError(f"nothing moved for {seen.timeout_s:g} s", also=_others(seen, None))


def _error(seen: Seen, rank: int, what: str) -> RunError:
    return RunError(what, rank=rank, action=seen.at.get(rank, ""), also=_others(seen, rank))


def _others(seen: Seen, rank: int | None) -> str:
    """Say where other ranks were."""
    found = dict(seen.at) | {each.rank: each.action for each in seen.broken}
    rest = [f"rank {other} at {where}" for other, where in sorted(found.items()) if other != rank and where]
    more = f" and {len(rest) - 4} more" if len(rest) > 4 else ""
    return ", ".join(rest[:4]) + more


class Kind(StrEnum):
    """What goes wrong on purpose: an exception, a process that dies, one that stops, one that computes for ever."""

    RAISE = "raise"
    KILL = "kill"
    STOP = "stop"
    SPIN = "spin"


@dataclass(frozen=True, slots=True)
class Fault:
    """At ``action`` of ``rank``, in its ``step``-th step from 0 on, something goes wrong."""

    kind: Kind
    rank: int
    action: str
    step: int = 0

    def install(self, program: RankProgram) -> None:
        """Have it happen.

        Raises:
            PiperError: the rank has no such action.
        """
        found = [i for i, (action, _, _) in enumerate(program.code) if str(program.plan.action(action)) == self.action]
        if not found:
            raise PiperError(f"rank {self.rank} has no action {self.action}")
        before, left = program.calls[found[0]], self.step

        def call() -> None:
            nonlocal left
            if left == 0:
                self.strike()
            left -= 1
            before()

        program.calls[found[0]] = call

    def strike(self) -> None:
        """Go wrong now."""
        match self.kind:
            case Kind.RAISE:
                raise ValueError("a fault made on purpose")
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(_FOR_EVER_S)  # the signal may take a moment
            case Kind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(_FOR_EVER_S)
            case Kind.SPIN:
                while True:
                    pass
            case _:
                assert_never(self.kind)
