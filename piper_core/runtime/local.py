"""Virtual ranks: many ranks in one process, of which one runs at a time, under the plan's own rendezvous rules.

Each rank is a thread, but they pass a baton: a rank runs until it waits for something that is not over, and then the
next rank in turn that can go on does. So runs repeat exactly, and when no rank can go on that is a deadlock, which is
reported with what each rank waits for. A message is over when both ends are there, a collective when all members are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from piper_core.errors import PlanError
from piper_core.runtime.communicator import Group

Result = TypeVar("Result")


class Ended(BaseException):
    """Raised in ranks that must stop because another one failed."""


@dataclass(slots=True)
class LocalWork:
    """A message or collective of one rank; ``what`` names it in reports of deadlocks."""

    ends: LocalCommunicator
    what: str
    done: bool = False

    def wait(self) -> None:
        """Let other ranks run until this is over."""
        if not self.done:
            self.ends.world.block(self.ends.rank, self)


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A group; ``calls`` are the collectives that wait for members, by their number."""

    ranks: tuple[int, ...]
    index: int
    label: str
    calls: dict[int, dict[int, tuple[str, Tensor, Any, LocalWork]]]
    count: list[int] = field(default_factory=lambda: [0])


class LocalWorld:
    """The ranks of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages: dict[tuple[int, int, int], tuple[deque[Any], deque[Any]]] = {}
        self.groups: dict[tuple[tuple[int, ...], str], dict[int, dict[int, Any]]] = {}
        self.ranks = [LocalCommunicator(self, rank) for rank in range(size)]
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[LocalWork | None] = [None] * size
        self._alive = [False] * size
        self._failure: BaseException | None = None

    def run(self, function: Callable[[LocalCommunicator], Result]) -> list[Result]:
        """Return ``function(communicator)`` of every rank, run together.

        Raises:
            PlanError: a deadlock, or collectives that do not match; else the first thing that a rank raised.
        """
        results: dict[int, Result] = {}
        self._alive, self._waits, self._failure = [True] * self.size, [None] * self.size, None

        def work(rank: int) -> None:
            self._go[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = function(self.ranks[rank])
            except Ended:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            self._alive[rank] = False
            self._pass_on(rank)

        threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._go[0].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            self.messages.clear()
            self.groups.clear()
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def block(self, rank: int, work: LocalWork) -> None:
        """Run others until ``work`` is over."""
        self._waits[rank] = work
        following = self._next(rank)
        if following != rank:
            if following is None:
                self._deadlock()
            self._go[rank if following is None else following].release()
            self._go[rank].acquire()
        self._waits[rank] = None
        if self._failure is not None:
            raise Ended

    def _next(self, rank: int) -> int | None:
        """Return the next rank in turn that can go on, this one last."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            work = self._waits[other]
            if self._alive[other] and (work is None or work.done or self._failure is not None):
                return other
        return None

    def _pass_on(self, rank: int) -> None:
        """Let another rank run, as this one has ended."""
        if not any(self._alive):
            return
        following = self._next(rank)
        if following is None:
            self._deadlock()
            following = self._next(rank)
        assert following is not None
        self._go[following].release()

    def _deadlock(self) -> None:
        stuck = [(r, w) for r, w in enumerate(self._waits) if self._alive[r] and w is not None]
        text = "; ".join(f"rank {rank} at {self.ranks[rank].where()} waits for {work.what}" for rank, work in stuck[:8])
        ended = [rank for rank in range(self.size) if not self._alive[rank]]
        also = f"; ranks {ended[:8]} have ended" if ended else ""
        self._failure = PlanError("deadlock", f"{text}{also}")


class LocalCommunicator:
    """A virtual rank's communicator; ``where`` says at what it is, for reports."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self.where: Callable[[], str] = lambda: "its start"

    def group(self, ranks: tuple[int, ...], label: str) -> LocalGroup:
        calls = self.world.groups.setdefault((ranks, label), {})
        return LocalGroup(ranks, ranks.index(self.rank), label, calls)

    def send(self, tensor: Tensor, peer: int, channel: int) -> LocalWork:
        work = LocalWork(self, f"rank {peer} to receive on channel {channel}")
        self._meet((self.rank, peer, channel), 0, (tensor, work))
        return work

    def recv(self, tensor: Tensor, peer: int, channel: int) -> LocalWork:
        work = LocalWork(self, f"rank {peer} to send on channel {channel}")
        self._meet((peer, self.rank, channel), 1, (tensor, work))
        return work

    def _meet(self, key: tuple[int, int, int], end: int, mine: tuple[Tensor, LocalWork]) -> None:
        queues = self.world.messages.setdefault(key, (deque(), deque()))
        if not queues[1 - end]:
            queues[end].append(mine)
            return
        other = queues[1 - end].popleft()
        source, target = (mine[0], other[0]) if end == 0 else (other[0], mine[0])
        if source.shape != target.shape or source.dtype != target.dtype:
            raise PlanError(
                "mispaired", f"rank {key[1]} receives {target.dtype} {tuple(target.shape)} on channel {key[2]}, rank "
                f"{key[0]} sends {source.dtype} {tuple(source.shape)}",
            )  # fmt: skip
        target.copy_(source)
        mine[1].done = other[1].done = True

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> LocalWork:
        return self._collect(group, f"all_reduce {operation}", tensor, tensor)

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> LocalWork:
        return self._collect(group, "all_gather", part, out)

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> LocalWork:
        return self._collect(group, "reduce_scatter", whole, out)

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> LocalWork:
        return self._collect(group, "all_to_all", given, (out, tuple(arriving), tuple(leaving)))

    def _collect(self, group: Group, kind: str, given: Tensor, out: Any) -> LocalWork:
        assert isinstance(group, LocalGroup)
        number = group.count[0]
        group.count[0] += 1
        members = group.calls.setdefault(number, {})
        work = LocalWork(self, f"{kind} number {number} of {group.label} among ranks {list(group.ranks)}")
        members[self.rank] = (kind, given, out, work)
        if len(members) == len(group.ranks):
            del group.calls[number]
            ordered = [members[rank] for rank in group.ranks]
            kinds = {(each[0], each[1].dtype) for each in ordered}
            if len(kinds) > 1:
                words = ", ".join(sorted(f"{name} of {dtype}" for name, dtype in kinds))
                raise PlanError("collective_order", f"members of {group.label} {list(group.ranks)} meet in {words}")
            _exchange(kind, [each[1] for each in ordered], [each[2] for each in ordered])
            for each in ordered:
                each[3].done = True
        return work


def _exchange(kind: str, given: list[Tensor], out: list[Any]) -> None:
    """Do a collective of all members at once."""
    match kind.split():
        case ["all_reduce", operation]:
            total = given[0].clone()
            for each in given[1:]:
                if operation == "sum":
                    total += each
                else:
                    total = torch.maximum(total, each) if operation == "max" else torch.minimum(total, each)
            for each in given:
                each.copy_(total)
        case ["all_gather"]:
            whole = torch.cat([each.reshape(-1) for each in given])
            for each in out:
                each.view(-1).copy_(whole)
        case ["reduce_scatter"]:
            total = given[0].clone()
            for each in given[1:]:
                total += each
            for part, each in zip(total.chunk(len(out)), out, strict=True):
                each.copy_(part.view_as(each))
        case _:
            parts = [each.split_with_sizes(list(sizes[2])) for each, sizes in zip(given, out, strict=True)]
            for i, (target, arriving, _) in enumerate(out):
                if [len(part[i]) for part in parts] != list(arriving):
                    raise PlanError("mispaired", f"an all_to_all brings member {i} other rows than it expects")
                torch.cat([part[i] for part in parts], out=target)
