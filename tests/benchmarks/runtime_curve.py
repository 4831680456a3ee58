"""Loss over 50 steps of tiny-llama and tiny-moe under DualPipeV, expert parallelism and ZeRO-1, against one process.

PIPER_BENCH_STEPS sets the number of steps. Float64; every step's loss must be the same to 1e-8.
"""

from __future__ import annotations

import os
from typing import Any

LIMIT = 1e-8


def main() -> int:
    """Print the curves; return 1 when they differ."""
    import torch

    from piper_core.arch.presets import PRESETS
    from piper_core.models import build_model
    from piper_core.runtime.local import LocalWorld
    from piper_core.runtime.lowering import slicing_of
    from piper_core.runtime.optimizer import AdamW, Clip
    from piper_core.runtime.program import RankProgram, Training
    from piper_core.runtime.reference import Reference
    from tests.torch_cpu.runtime.cases import Case, batches, compiled, lowering

    torch.set_num_threads(1)
    steps, kept = int(os.environ.get("PIPER_BENCH_STEPS", "50")), True
    training = Training(AdamW(3e-3), Clip(1.0))
    for name, experts in (("tiny-llama", 1), ("tiny-moe", 2)):
        case = Case(PRESETS[name], "dualpipev", pp=2, v=2, m=4, dp=2, ep=experts, zero=1, buckets=False)
        data = batches(case, 8)  # eight batches again and again, so that there is something to learn
        shared = lowering(case, torch.float64)

        def train(mine: Any, shared: Any = shared, data: Any = data) -> list[float]:
            program = RankProgram(shared, mine.rank, mine, training)
            return [float(program.step(*data[i % len(data)])) for i in range(steps)]

        found = [sum(each) for each in zip(*LocalWorld(case.ranks).run(train), strict=True)]
        model = build_model(case.architecture, dtype=torch.float64, seed=1)
        reference = Reference(model, slicing_of(compiled(case)), training)
        expected = [reference.step(*data[i % len(data)]).loss for i in range(steps)]
        worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        shown = " ".join(f"{found[i]:.4f}" for i in range(0, steps, max(1, steps // 8)))
        print(
            f"{case}: {shown} ... {found[-1]:.4f}; greatest relative difference {worst:.1e} (limit {LIMIT:.0e})",
            flush=True,
        )
        kept &= worst <= LIMIT and found[-1] < found[0]
    return 0 if kept else 1
