"""From nothing to the first step: a Ray cluster of this machine's own and four CPU actors, a pipeline of tiny-llama.

The time counts from the trainer's making, with torch imported, to the end of the first step; the CPU seconds are those
of this process and of all that it started. The limit is for two cores that do nothing else: PIPER_BENCH_SHARED=1 prints
without judging. PIPER_BENCH_STARTS sets how many starts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RANKS, MICROBATCHES, SEQ, LIMIT_S = 4, 8, 32, 20.0
STARTS = int(os.environ.get("PIPER_BENCH_STARTS", "3"))
SHARED = os.environ.get("PIPER_BENCH_SHARED", "") not in ("", "0")


def main() -> int:
    """Print the table; return 1 when the limit is broken."""
    print(f"{'start':6}{'to the actors s':>16}{'to the first step s':>20}{'CPU s':>8}{'limit':>7}")
    found = []
    for start in range(STARTS):
        done = subprocess.run(
            [sys.executable, "-c", "from tests.benchmarks.runtime_start import once\nonce()"],
            capture_output=True, text=True, check=True, preexec_fn=_all_cores,
        )  # fmt: skip
        built, stepped, cpu = map(float, done.stdout.split())
        found.append(stepped)
        print(f"{start:<6}{built:16.1f}{stepped:20.1f}{cpu:8.1f}{LIMIT_S:7.0f}", flush=True)
    print(f"median {statistics.median(found):35.1f}")
    return 0 if SHARED or statistics.median(found) <= LIMIT_S else 1


def once() -> None:
    """Print seconds until the ranks are built, until the first step is over, and CPU seconds."""
    import torch

    from piper_core.ir.action import format_slots
    from piper_core.mesh import Mesh
    from piper_core.program.program import Program
    from piper_core.program.strategy import Header, Strategy
    from piper_core.runtime.trainer import Trainer
    from piper_core.schedule.families import get_family

    rows = get_family("1f1b").grid(RANKS, MICROBATCHES, 1).rows
    program = Program.parse(
        [
            {"op": "stage", "stages": RANKS},
            {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": MICROBATCHES},
            *({"op": "place", "filter": {"PP": s}, "devices": [s]} for s in range(RANKS)),
            {"op": "order", "actions": {str(r): format_slots(row) for r, row in enumerate(rows)}},
        ]
    )
    header = Header(mesh=Mesh((("pp", RANKS),)), global_batch=MICROBATCHES, seq_len=SEQ, micro_batch=1)
    tokens = torch.zeros(MICROBATCHES, SEQ, dtype=torch.int64)
    began, used = time.perf_counter(), time.process_time()
    with Trainer("tiny-llama", Strategy(header, program)) as trainer:
        built = time.perf_counter() - began
        trainer.step((tokens, tokens))
        stepped = time.perf_counter() - began
        cpu = time.process_time() - used + _used_by_others()
    print(built, stepped, cpu)


def _used_by_others() -> float:
    """Return the CPU seconds of the processes below this one, ended ones included."""
    from piper_core.runtime.ray_session import below

    total = 0
    for pid in [os.getpid(), *below([os.getpid()])]:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += sum(map(int, fields[13:15] if pid == os.getpid() else fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def _all_cores() -> None:
    """Undo the one core that the benchmarks are held to."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
