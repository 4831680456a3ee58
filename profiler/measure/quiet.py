"""Quiet on a busy machine: whether anything else ran meanwhile, and how to come before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from piper_core.errors import ConfigError

TASKS = Path("/proc/self/task")


def waited_s() -> float:
    """Return the seconds that threads of this process have been ready to run and did not (0 where the kernel does not
    say)."""
    total = 0
    with suppress(OSError, IndexError, ValueError):
        for thread in os.listdir(TASKS):
            with suppress(FileNotFoundError):
                total += int((TASKS / thread / "schedstat").read_text().split()[1])
    return total / 1e9


def check_priority() -> None:
    """Reject priority where the system does not grant it.

    Raises:
        ConfigError: it does not.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (OSError, AttributeError):
        raise ConfigError("--priority needs root or CAP_SYS_NICE on Linux; leave it out on a quiet machine") from None


@contextmanager
def before_others(wanted: bool) -> Iterator[None]:
    """Run all threads of this process before those of others inside, if ``wanted``; for milliseconds at a time."""
    if not wanted:
        yield
        return
    _schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    """Set all threads alike: those of gloo then take turns with the main one, and messages of a rank that computes go
    out late. Times of steps are too long by that; without priority they are too long by what others take."""
    for thread in os.listdir(TASKS):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
