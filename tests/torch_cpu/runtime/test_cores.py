"""What computes is bound to its rank's cores; what carries messages is not, and takes short turns."""

from __future__ import annotations

import os
import platform

import pytest

from piper_core.runtime.cores import SLICE_NS, own_cores
from profiler.measure.processes import on_processes
from tests.torch_cpu.runtime.bound import bound

EEVDF = (6, 12)


def test_each_rank_has_an_equal_part_of_the_cores() -> None:
    assert own_cores(0, 2, {3, 1}) == {1}
    assert own_cores(1, 2, {3, 1}) == {3}
    assert [own_cores(i, 2, set(range(9))) for i in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_ranks_without_cores_of_their_own_are_not_bound() -> None:
    assert own_cores(0, 1, {0, 1}) == set(), "alone, it may use all"
    assert own_cores(2, 3, {0, 1}) == set()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_machine_are_bound() -> None:
    everywhere = os.sched_getaffinity(0)
    linux = tuple(int(part) for part in platform.release().split(".")[:2])
    for rank, (main, others, slices) in enumerate(on_processes(bound, 2, timeout_s=60.0)):
        assert main == own_cores(rank, 2, everywhere)
        assert len(others) > 1
        assert all(each == everywhere for each in others)
        assert linux < EEVDF or set(slices) == {SLICE_NS}
