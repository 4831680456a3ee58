"""What a person waits for before anything happens: imports, help, the check of a small strategy. One core."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPEATS = 15
STRATEGY = Path(__file__).parents[1] / "golden" / "readme" / "ten_lines.yaml"
COMMAND = "import sys\nfrom search.cli import main\nsys.exit(main({words!r}))"


def seconds(program: str, cache: str) -> tuple[float, float, float]:
    """Return the median, the least and the median CPU seconds of a Python process, its bytecode cached as usual."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    walls, cpus = [], []
    for _ in range(REPEATS + 1):
        start_s, before_s = time.perf_counter(), _children_s()
        subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL, check=True)
        walls.append(time.perf_counter() - start_s)
        cpus.append(_children_s() - before_s)
    return median(walls[1:]), min(walls[1:]), median(cpus[1:])  # the first one wrote the bytecode


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Print the table; return 1 when a limit is broken."""
    from piper_core import load

    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.json"
        small.write_text(json.dumps(load(STRATEGY).to_data()))
        cases = (
            ("python, nothing imported", "pass", None),
            ("import numpy", "import numpy", None),
            ("import piper_core", "import piper_core", 0.1),
            ("piper-search --help", COMMAND.format(words=["--help"]), None),
            ("piper-search models", COMMAND.format(words=["models"]), None),
            ("piper-search check small.json", COMMAND.format(words=["check", str(small)]), 0.3),
            ("piper-search check ten_lines.yaml", COMMAND.format(words=["check", str(STRATEGY)]), 0.3),
        )
        print(f"{'process':36}{'median s':>10}{'least s':>10}{'CPU s':>10}{'limit s':>10}")
        kept = True
        for name, program, limit_s in cases:
            median_s, least_s, cpu_s = seconds(program, folder)
            print(f"{name:36}{median_s:10.3f}{least_s:10.3f}{cpu_s:10.3f}{limit_s or '':>10}")
            kept &= limit_s is None or least_s <= limit_s
    return 0 if kept else 1
