"""Tracing and running chunk graphs: cold and warm command, eager autograd against chunk graphs. One core.

PIPER_BENCH_COMPILED=1 also compiles (minutes): chunk graphs against eager autograd and against torch.compile.
PIPER_BENCH_STEPS=1 leaves the commands out, PIPER_BENCH_PAIRS sets the number of pairs. Whoever takes a step keeps its
gradients until the next one, and the heap keeps what is freed (:mod:`piper_core.frontend.heap`): else a call pays for
memory that the call before gave back.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PAIRS = int(os.environ.get("PIPER_BENCH_PAIRS", "41"))
COMMAND = "import sys\nfrom search.cli import main\nsys.exit(main(['trace', '--model', {model!r}, '--json']))"
COLD = (("llama9b", 8.0), ("llama3-405b", 15.0), ("deepseek-v3", 15.0))
WARM_S, MEMORY_BYTES = 0.5, 2e9
OVERHEAD, SPLIT_OVERHEAD, COMPILED, COMPILED_MODULE = 1.03, 1.05, 0.95, 1.0


def main() -> int:
    """Print the tables; return 1 when a limit is broken."""
    kept = bool(os.environ.get("PIPER_BENCH_STEPS")) or commands()
    kept &= steps()
    return 0 if kept else 1


def commands() -> bool:
    """Time ``piper-search trace`` with an empty cache and with a full one."""
    kept = True
    print(f"{'trace':14}{'cold s':>9}{'CPU s':>9}{'limit s':>9}{'MB':>7}{'warm s':>9}{'limit s':>9}")
    for model, limit_s in COLD:
        with tempfile.TemporaryDirectory() as folder:
            cold_s, cpu_s, peak = process(model, folder)
            warm = [process(model, folder)[0] for _ in range(5)]
        cold = f"{cold_s:9.2f}{cpu_s:9.2f}{limit_s:9.1f}{peak / 1e6:7.0f}"
        print(f"{model:14}{cold}{statistics.median(warm):9.3f}{WARM_S:9.1f}", flush=True)
        kept &= cold_s <= limit_s and peak < MEMORY_BYTES and min(warm) <= WARM_S
    return kept


def process(model: str, cache: str) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and peak bytes of a process that traces a model."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = COMMAND.format(model=model)
    environment = os.environ | {"PIPER_CACHE": cache}
    subprocess.run([sys.executable, "-c", command], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s, after.ru_maxrss * 1024.0


def steps() -> bool:
    """Compare a step of a 4-layer model, hidden 512, by eager autograd and by chunk graphs."""
    import torch

    from piper_core.arch import Architecture
    from piper_core.frontend.capture import capture
    from piper_core.frontend.cut import cut
    from piper_core.frontend.heap import keep_heap
    from piper_core.frontend.run import Step
    from piper_core.models import build_model

    keep_heap()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(Architecture("bench", 4, 512, 1408, 8, 8, 64, 512), dtype=torch.float32)
    tokens, targets = torch.randint(0, 512, (2, 2, 256)).unbind()
    made = cut(capture(model, (tokens, targets)))

    def eager() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, targets).backward()

    def of(step: Step) -> Callable[[], Any]:
        held: list[Any] = []

        def call() -> None:
            held.clear()
            held.append(step(model, tokens, targets))

        return call

    whole, apart = of(Step(made)), of(Step(made, split_backward=True))
    print(f"\n{'paired ratios, median of ' + str(PAIRS):44}{'ratio':>8}{'limit':>8}")
    kept = report("chunk graphs / eager autograd", ratio(whole, eager), OVERHEAD)
    kept &= report("BI and BW / B whole", ratio(apart, whole), SPLIT_OVERHEAD)
    if os.environ.get("PIPER_BENCH_COMPILED"):
        module = torch.compile(model)

        def compiled() -> None:
            model.zero_grad(set_to_none=True)
            module(tokens, targets).backward()

        chunks = of(Step(made, compiler="inductor"))
        kept &= report("compiled chunk graphs / eager autograd", ratio(chunks, eager), COMPILED)
        kept &= report("compiled chunk graphs / compiled module", ratio(chunks, compiled), COMPILED_MODULE)
    return kept


def ratio(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Return the median of the ratios of two calls' CPU times, one after the other, in alternating order."""
    for _ in range(3):
        first()
        second()
    found = []
    for i in range(PAIRS):
        times = {}
        for call in (first, second) if i % 2 else (second, first):
            start_s = time.process_time()
            call()
            times[call] = time.process_time() - start_s
        found.append(times[first] / times[second])
    return statistics.median(found)


def report(name: str, value: float, limit: float) -> bool:
    print(f"{name:44}{value:8.3f}{limit:8.2f}", flush=True)
    return value <= limit
