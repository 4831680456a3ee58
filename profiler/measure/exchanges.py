"""Collectives and messages as the runtime makes them: by its communicator, on groups of their own, waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from piper_core.runtime.cores import bind
from piper_core.runtime.gloo import GlooCommunicator
from piper_core.runtime.groups import AxisGroups
from piper_core.runtime.nccl import NcclCommunicator
from profiler.record import SEND

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_exchange", SEND)
AXIS, RING, THERE = "context", 0, 1
"""Name of the group, and the channels of what goes round a ring and of messages."""


class Exchanges:
    """What one rank exchanges with all the others of its machine."""

    def __init__(self, communicator: GlooCommunicator | NcclCommunicator, device: torch.device) -> None:
        self.communicator, self.device, self.members = communicator, device, dist.get_world_size()
        self.group = communicator.group(tuple(range(self.members)), "measured")
        self.groups = AxisGroups(communicator, {AXIS: self.group}, RING)

    def call(self, what: str, size: int) -> Callable[[], object]:
        """Return one exchange of ``size`` bytes, as :class:`profiler.record.Transfer` counts them; a message goes
        there and comes back."""
        n, groups = self.members, self.groups
        elements = max(n, size // 4 // n * n)
        whole = torch.ones(n, elements // n, device=self.device)
        part = whole[0].clone()
        match what:
            case "all_reduce":
                return lambda: groups.all_reduce(whole, "sum", AXIS)
            case "all_gather":
                return lambda: groups.all_gather(part, AXIS)
            case "reduce_scatter":
                return lambda: groups.reduce_scatter(whole, AXIS)
            case "all_to_all":
                return lambda: groups.all_to_all(whole, [1] * n, [1] * n, AXIS)
            case "ring_exchange":
                return lambda: self._go_round(part)
            case "send":
                return lambda: self._there_and_back(whole)
            case _:
                raise AssertionError(what)

    def _go_round(self, part: torch.Tensor) -> None:
        for _ in range(self.members - 1):
            self.groups.pass_on([part], AXIS)()

    def _there_and_back(self, tensor: torch.Tensor) -> None:
        rank, peer, came = self.communicator.rank, self.communicator.rank ^ 1, torch.empty_like(tensor)
        works = [self.communicator.send(tensor, peer, THERE)] if rank == 0 else []
        self.communicator.recv(came, peer, THERE).wait()
        if rank:
            works.append(self.communicator.send(came, peer, THERE))
        for work in works:
            work.wait()


@contextmanager
def exchanges(kind: str) -> Iterator[Exchanges]:
    """Give this rank's exchanges on a kind of device; its threads end afterwards."""
    made: GlooCommunicator | NcclCommunicator = GlooCommunicator() if kind == "cpu" else NcclCommunicator()
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())
    try:
        found = Exchanges(made, device)
        if kind == "cpu":
            bind(dist.get_rank(), dist.get_world_size())
        yield found
    finally:
        made.close()
