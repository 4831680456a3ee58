"""Run the benchmarks: ``python -m tests.benchmarks [name ...]``.

A benchmark is a module of this folder with a function ``main`` that prints its figures and returns None or 0
when they are within its limits. Each runs on one core, in a process of its own, so that no memory or cache is
shared.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def discover(folder: Path = HERE) -> list[str]:
    """Return the names of modules that define ``main``, sorted."""
    names = []
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("__"):
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body):
            names.append(path.stem)
    return names


def run(name: str) -> bool:
    """Run one benchmark, its output passed through; return whether it kept its limits."""
    print(f"== {name}", flush=True)
    start_s = time.perf_counter()
    program = f"import sys\nfrom tests.benchmarks.{name} import main\nsys.exit(main())"
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    code = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False).returncode
    verdict = "ok" if code == 0 else f"FAILED ({code})"
    print(f"== {name}: {verdict} in {time.perf_counter() - start_s:.1f} s\n", flush=True)
    return code == 0


def main(arguments: list[str]) -> int:
    """Run the benchmarks named, or all; return the exit status."""
    known = discover()
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known) or 'none'}", file=sys.stderr)
        return 2
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    failed = [name for name in arguments or known if not run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
