"""Run a function on several gloo processes and return what each returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from piper_core.frontend.apart import apart

TIMEOUT_S = 300.0


def on_ranks(function: Callable[..., Any], size: int, folder: Path, *args: object) -> list[Any]:
    """Return ``function(rank, size, store file, *args)`` of every rank, each in a process of its own."""
    store = str(folder / f"{function.__name__}-{size}")
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(apart, function, rank, size, store, *args, timeout_s=TIMEOUT_S) for rank in range(size)]
    errors = [error for call in calls if (error := call.exception()) is not None]
    if errors:
        raise errors[0]
    return [call.result() for call in calls]


def join(rank: int, size: int, store: str) -> None:
    """Make the gloo group of all ranks the default of this process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                            timeout=timedelta(seconds=60))  # fmt: skip
