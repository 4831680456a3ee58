"""Run a function on several gloo processes and return what each returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from piper_core.frontend.apart import apart

TIMEOUT_S = 300.0
"""Far above what a busy machine needs; a rank that waits for a dead one gives up sooner."""


def on_ranks(function: Callable[..., Any], size: int, folder: Path, *args: object) -> list[Any]:
    """Return ``function(rank, size, store file, *args)`` of every rank, each in a process of its own."""
    store = str(folder / f"{function.__name__}-{size}")
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(apart, function, rank, size, store, *args, timeout_s=TIMEOUT_S) for rank in range(size)]
    errors = [error for call in calls if (error := call.exception()) is not None]
    if errors:
        raise errors[0]
    return [call.result() for call in calls]
