"""Run a function on several gloo processes and return what each returns."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is there

LIMIT_S = 120.0
"""Far above what a busy machine needs; a rank that waits for a dead one gives up sooner."""


def on_ranks(function: Callable[..., Any], size: int, store: str, *args: object) -> list[Any]:
    """Return ``function(rank, *args)`` of every rank, each in a fork of this process with gloo as its default group.

    Needs a process without other threads (:func:`piper_core.frontend.apart.apart` gives one); what it has imported and
    captured, its forks have too.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    forks = [
        context.Process(target=_one, args=(function, rank, size, store, sender, args), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for fork in forks:
        fork.start()
    answers = []
    for rank, (receiver, sender) in enumerate(pipes):
        sender.close()
        if not receiver.poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} of {size} gave no answer in {LIMIT_S:.0f} s")
        answer = receiver.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"rank {rank} of {size}: {answer}")
        answers.append(answer)
    for fork in forks:
        fork.join()
    return answers


def _one(function: Callable[..., Any], rank: int, size: int, store: str, sender: Any, args: Sequence[object]) -> None:
    dist.init_process_group(
        "gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    try:
        sender.send(function(rank, *args))
    except Exception:
        sender.send(traceback.format_exc())
    finally:
        dist.destroy_process_group()
