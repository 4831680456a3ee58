"""Random compositions on virtual ranks against one process: losses, norms, gradients and parameters of two steps.

Hypothesis draws them (PIPER_BENCH_COMPOSITIONS, 200 unless set; PIPER_BENCH_SEED, 0) and makes a failing one as simple
as it can. Float64 to 1e-8; every fourth also in float32, gradients and parameters under SGD to 1e-5.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace


def main() -> int:
    """Print what was run; return 1 when one differs."""
    import torch
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    from piper_core.runtime.optimizer import SGD
    from tests.torch_cpu.runtime import cases
    from tests.torch_cpu.runtime.cases import check
    from tests.torch_cpu.runtime.compositions import Composition, compose, features

    torch.set_num_threads(1)
    count = int(os.environ.get("PIPER_BENCH_COMPOSITIONS", "200"))
    seen: Counter[str] = Counter()
    done: dict[str, Composition] = {}
    start = time.monotonic()

    @seed(int(os.environ.get("PIPER_BENCH_SEED", "0")))
    @settings(max_examples=3 * count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        each = compose(lambda values: data.draw(st.sampled_from(list(values))))
        if str(each) in done or len(done) >= count:
            return
        check(each.case, each.training)
        if len(done) % 4 == 0:
            optimizer = SGD(0.1, 0.9)
            check(each.case, replace(each.training, optimizer=optimizer), torch.float32, 1e-5)
        done[str(each)] = each
        seen.update(map(str, features(each)))
        cases.lowering.cache_clear()  # tables of a program; captures stay
        if len(done) % 20 == 0:
            print(f"{len(done):4} in {time.monotonic() - start:5.0f} s", flush=True)

    try:
        run()
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(done)} compositions train as one process does; how many had what:")
    print(", ".join(f"{name} {n}" for name, n in sorted(seen.items())))
    return 0 if len(done) >= count else 1
