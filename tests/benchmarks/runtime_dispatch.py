"""What the runtime itself takes for each action: chunks that compute nothing, messages that are over at once."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

LIMIT_US = 30.0
STEPS = 15


def main() -> int:
    """Print microseconds an action; return 1 when a limit is broken."""
    import torch

    from piper_core.arch.record import Architecture
    from piper_core.runtime.graphs import Macros
    from piper_core.runtime.optimizer import SGD
    from piper_core.runtime.program import RankProgram, Training
    from piper_core.runtime.steps import Do
    from tests.torch_cpu.runtime.cases import Case, batches, lowering

    torch.set_num_threads(1)
    tiny = Architecture("dispatch", 4, 16, 32, 4, 4, 4, 32)
    cases = {
        "1F1B, PP2": Case(tiny, "1f1b", pp=2, m=64),
        "ZBV, PP2": Case(tiny, "zbv", pp=2, v=2, m=64),
        "DualPipeV, PP2": Case(tiny, "dualpipev", pp=2, v=2, m=64),
        "1F1B, PP2 DP2 ZeRO-3": Case(tiny, "1f1b", pp=2, m=64, dp=2, zero=3, buckets=False),
    }
    original, kept = Macros.macro, True

    def empty(self: Any, *arguments: Any) -> Any:
        made = original(self, *arguments)
        outputs = tuple(torch.zeros(()) for _ in made.outputs)
        return replace(made, call=lambda arguments: outputs)

    Macros.macro = empty  # type: ignore[method-assign, assignment]  # chunks without work
    print(f"{'program':24}{'actions':>9}{'calls':>7}{'us an action':>14}{'limit':>7}")
    for name, case in cases.items():
        shared = lowering(case, torch.float32)
        program = RankProgram(shared, 0, _Nobody(0), Training(SGD(), balance_rate=0.0))
        slices = program.slices(*batches(case, 1)[0])
        actions = len({action for action, do, _ in program.code})
        assert actions < len(program.code)
        assert {do for _, do, _ in program.code} == set(Do)
        times = []
        for _ in range(STEPS):
            start = time.process_time()
            program.run(slices)
            times.append(time.process_time() - start)
        each_us = 1e6 * statistics.median(times) / actions
        print(f"{name:24}{actions:9}{len(program.code):7}{each_us:14.1f}{LIMIT_US:7.0f}", flush=True)
        kept &= each_us <= LIMIT_US
    return 0 if kept else 1


class _Over:
    def wait(self) -> None:
        pass


class _Everyone:
    def __init__(self, ranks: tuple[int, ...], index: int) -> None:
        self.ranks, self.index = ranks, index


class _Nobody:
    """A communicator for which everything is over at once."""

    def __init__(self, rank: int) -> None:
        self.rank, self._over = rank, _Over()

    def group(self, ranks: tuple[int, ...], label: str) -> _Everyone:
        return _Everyone(ranks, ranks.index(self.rank))

    def _nothing(self, *arguments: Any) -> _Over:
        return self._over

    send = recv = all_reduce = all_gather = reduce_scatter = all_to_all = _nothing
