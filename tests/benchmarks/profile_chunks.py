"""The profiled time of chunks against their time inside a running step, in one process, turn about.

A step on one rank: each forward and each backward of a microbatch is one macro action, whose time is set beside the sum
of the profiled chunks in it (embedding, every layer's regions, head). Both are processor time of the one thread that
computes, so that other programs disturb them little; medians over rounds, in each of which both are timed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from time import thread_time
from typing import Any

SEQ, ROUNDS, MICROBATCHES, CALLS = 128, 15, 4, 3
LIMIT = 0.05
"""Largest mean difference of a model's phases and sizes from a running step (issue: within 5 %)."""
CASES = [("tiny-llama", 1), ("tiny-llama", 4), ("tiny-moe", 1), ("tiny-moe", 4)]


def main() -> int:
    """Print profiled against running; return 1 when the mean difference is above the limit."""
    from piper_core.frontend.apart import apart

    print(f"{'model':12}{'b':>3}{'phase':>7}{'in a step':>11}{'profiled':>11}{'ratio':>8}{'quartiles':>18}")
    off = []
    for model, micro_batch in CASES:
        ratios = apart(measured, model, micro_batch)
        for phase, rows in ratios.items():
            running, profiled = (median(column) for column in zip(*rows, strict=True))
            each = sorted(b / a for a, b in rows)
            low, middle, high = each[len(each) // 4], median(each), each[3 * len(each) // 4]
            off.append(abs(middle - 1))
            print(f"{model:12}{micro_batch:3}{phase:>7}{running * 1e3:9.2f}ms{profiled * 1e3:9.2f}ms{middle:8.3f}"
                  f"{low:9.3f} to {high:.3f}", flush=True)  # fmt: skip
    mean = sum(off) / len(off)
    print(f"mean difference {mean:.1%}, largest {max(off):.1%} (limit of the mean {LIMIT:.0%})")
    return 0 if mean <= LIMIT else 1


def measured(model: str, micro_batch: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by phase, pairs of seconds in a step and of the same chunks by themselves, one a round."""
    import torch

    from piper_core.arch.presets import preset
    from piper_core.runtime.groups import degrees_of
    from piper_core.runtime.local import LocalWorld
    from piper_core.runtime.lowering import Lowering
    from piper_core.runtime.model import ArchitectureSource
    from profiler.measure.layers import Layers
    from profiler.spec import load_cluster
    from search.predict import predict
    from search.request import Request

    torch.set_num_threads(1)
    architecture = preset(model)
    asked = Request(architecture, load_cluster("cpu"), seq_len=SEQ, micro_batch=micro_batch,
                    num_microbatches=MICROBATCHES)  # fmt: skip
    compiled = predict(asked).compiled
    source = ArchitectureSource(architecture, micro_batch, SEQ, degrees_of(compiled.dag))
    lowering, layers = Lowering(compiled, source), Layers(architecture, micro_batch, SEQ)
    (found,) = LocalWorld(1).run(lambda communicator: _rounds(lowering, layers, communicator, architecture))
    return found


def _rounds(lowering: Any, layers: Any, communicator: Any, architecture: Any) -> dict[str, list[tuple[float, float]]]:
    import torch

    from piper_core.names import Phase, Recompute, Region
    from piper_core.runtime.program import RankProgram

    program = RankProgram(lowering, 0, communicator)
    generator = torch.Generator().manual_seed(0)
    shape = lowering.slicing.batch, SEQ
    tokens, targets = (torch.randint(0, architecture.vocab, shape, generator=generator) for _ in range(2))
    slices = program.slices(tokens, targets)
    kinds = [program.plan.action(action).kind.name for action, *_ in program.code]
    dense = architecture.dense_layers if architecture.experts else architecture.layers
    count = defaultdict(lambda: architecture.layers, {
        Region.EMBED: 1, Region.HEAD: 1, Region.MLP: dense, Region.EXPERT: architecture.moe_layers,
        Region.ROUTER: architecture.moe_layers,
    })  # fmt: skip
    with torch.no_grad(), layers.inside():
        calls = {
            (site.phase.name, site.region): layers.turns(unit) for site, unit, _ in layers.units()
            if site.phase in (Phase.F, Phase.B) and site.policy is Recompute.NONE
        }  # fmt: skip
    rows: dict[str, list[tuple[float, float]]] = {"F": [], "B": []}
    for turn in range(ROUNDS + 2):
        spent: Mapping[str, list[float]] = {"F": [], "B": []}

        def around(steps: Any, spent: Mapping[str, list[float]] = spent) -> None:
            for at, call in enumerate(steps):
                program.at = at
                start = thread_time()
                call()
                if kinds[at] in spent:
                    spent[kinds[at]].append(thread_time() - start)

        program.run(slices, around)
        alone = dict.fromkeys(rows, 0.0)
        with torch.no_grad(), layers.inside():
            for (phase, region), call in calls.items():
                times = []
                for _ in range(CALLS):
                    start = thread_time()
                    call()
                    times.append(thread_time() - start)
                alone[phase] += count[region] * median(times)
        for phase, pairs in rows.items():
            if turn >= 2:  # the first two warm up
                pairs.append((sum(spent[phase]) / MICROBATCHES, alone[phase]))
    return rows


if __name__ == "__main__":
    sys.exit(main())
