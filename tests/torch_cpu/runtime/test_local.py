"""Virtual ranks: what they exchange, what they say when they cannot go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from piper_core.errors import ConfigError, PlanError
from piper_core.runtime.local import LocalCommunicator, LocalWorld

RANKS = 3
ALL = tuple(range(RANKS))


def parts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2, generator=generator, dtype=torch.float64) for _ in ALL]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("sum", torch.Tensor.sum), ("max", torch.Tensor.amax), ("min", torch.Tensor.amin)],
)
def test_all_reduce(operation: str, expected: Any) -> None:
    def work(mine: LocalCommunicator) -> Tensor:
        x = parts()[mine.rank]
        mine.all_reduce(x, mine.group(ALL, "g"), operation).wait()
        return x

    wanted = expected(torch.stack(parts()), 0)
    for found in LocalWorld(RANKS).run(work):
        torch.testing.assert_close(found, wanted)


def test_gather_scatter_and_exchange() -> None:
    leaving = [[1, 2, 3], [0, 6, 0], [2, 2, 2]]

    def work(mine: LocalCommunicator) -> tuple[Tensor, Tensor, Tensor]:
        group, x, rank = mine.group(ALL, "g"), parts()[mine.rank], mine.rank
        every, part = torch.empty(18, 2, dtype=x.dtype), torch.empty(2, 2, dtype=x.dtype)
        arriving = [row[rank] for row in leaving]
        came = torch.empty(sum(arriving), 2, dtype=x.dtype)
        works = [mine.all_gather(every, x, group), mine.reduce_scatter(part, x, group)]
        works.append(mine.all_to_all(came, x, arriving, leaving[rank], group))
        for each in works:
            each.wait()
        return every, part, came

    cut = [x.split(row) for x, row in zip(parts(), leaving, strict=True)]  # type: ignore[no-untyped-call]  # torch's
    for rank, (every, part, came) in enumerate(LocalWorld(RANKS).run(work)):
        assert torch.equal(every, torch.cat(parts()))
        torch.testing.assert_close(part, torch.stack(parts()).sum(0)[2 * rank : 2 * rank + 2])
        assert torch.equal(came, torch.cat([row[rank] for row in cut]))


def test_messages_meet_in_order_of_their_channel() -> None:
    def work(mine: LocalCommunicator) -> list[float]:
        if mine.rank == 0:
            sent = [mine.send(torch.full((2,), float(i)), 1, channel) for i, channel in enumerate((5, 7, 5))]
            for each in sent:
                each.wait()
            return []
        if mine.rank == 2:
            return []
        found = [torch.empty(2) for _ in range(3)]
        works = [mine.recv(x, 0, channel) for x, channel in zip(found, (7, 5, 5), strict=True)]
        for each in works:
            each.wait()
        return [float(x[0]) for x in found]

    assert LocalWorld(RANKS).run(work)[1] == [1.0, 0.0, 2.0]


def test_a_send_is_over_when_it_is_received() -> None:
    """Rendezvous: two ranks that both send before they receive wait for each other."""

    def work(mine: LocalCommunicator) -> None:
        mine.where = lambda: f"its exchange {mine.rank}"
        other, x = 1 - mine.rank, torch.zeros(1)
        mine.send(x, other, 0).wait()
        mine.recv(x, other, 0).wait()

    with pytest.raises(PlanError, match="rank 0 at its exchange 0 waits for rank 1 to receive on channel 0") as caught:
        LocalWorld(2).run(work)
    assert caught.value.reason == "deadlock"


def test_who_waits_for_a_rank_that_has_ended_is_told_so() -> None:
    def work(mine: LocalCommunicator) -> None:
        if mine.rank:
            mine.all_reduce(torch.zeros(1), mine.group(ALL, "norm")).wait()

    with pytest.raises(PlanError, match=r"all_reduce sum number 0 of norm .*ranks \[0\] have end"):
        LocalWorld(RANKS).run(work)


def test_what_does_not_match_is_refused() -> None:
    def message(mine: LocalCommunicator) -> None:
        if mine.rank == 0:
            mine.send(torch.zeros(3), 1, 0).wait()
        else:
            mine.recv(torch.zeros(2), 0, 0).wait()

    with pytest.raises(PlanError, match=r"mispaired: rank 1 receives torch.float32 \(2,\) on channel 0"):
        LocalWorld(2).run(message)

    def collective(mine: LocalCommunicator) -> None:
        group, x = mine.group((0, 1), "g"), torch.zeros(2)
        (mine.all_reduce(x, group) if mine.rank else mine.all_gather(torch.zeros(4), x, group)).wait()

    with pytest.raises(PlanError, match=r"collective_order: members of g .* meet in all_gather .*, all_reduce sum"):
        LocalWorld(2).run(collective)


def test_the_error_of_a_rank_ends_all() -> None:
    def work(mine: LocalCommunicator) -> None:
        if mine.rank == 1:
            raise ConfigError("no luck")
        mine.all_reduce(torch.zeros(1), mine.group(ALL, "g")).wait()

    world = LocalWorld(RANKS)
    with pytest.raises(ConfigError, match="no luck"):
        world.run(work)
    assert world.run(lambda mine: mine.rank) == [0, 1, 2]
