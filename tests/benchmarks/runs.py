"""The four searches that the benchmarks of the search speak of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

GPUS, GLOBAL_BATCH, SEQ_LEN = 32, 512, 4096
PROGRAM = "import sys\nfrom search.cli import main\nsys.exit(main())"


@dataclass(frozen=True, slots=True)
class Run:
    """One search: a model on 32 GPUs of a cluster, some axes held."""

    model: str
    cluster: str
    fix: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The words that come after ``piper-search``."""
        words = ["--model", self.model, "--gpus", str(GPUS), "--cluster", self.cluster]
        return [*words, "--fix", *self.fix] if self.fix else words

    def __str__(self) -> str:
        return " ".join([self.model, f"on {GPUS} {self.cluster}", *self.fix])


RUNS = (
    Run("llama9b", "p4de"),
    Run("llama9b", "p4de", ("pp=4",)),
    Run("piper-9b", "p4de"),
    Run("llama9b", "p4d"),
)


def search(run: Run) -> tuple[dict[str, Any], float]:
    """Run ``piper-search`` in a new process on all cores; return its JSON and its wall seconds, start included."""
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        command = [sys.executable, "-c", PROGRAM, *run.arguments, "--json", "--execute", "0", "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=_all_cores)
        return json.loads(done.stdout), time.perf_counter() - start_s


def _all_cores() -> None:
    """Undo the one core that the benchmarks are held to: the command is made for all of them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
