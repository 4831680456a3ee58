"""Two ranks on two Ray nodes with one CPU each: a run that is compared with one process and saved, one that goes on
from its checkpoint, and one whose second node is lost.

Both nodes are on this machine; what they share of it (a file system, a clock) is not used by what is checked, but for
the checkpoint. Not one of the tests: it starts two Ray nodes and three runs, about two minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

RUN = [sys.executable, "-c", "import sys\nfrom search.cli import main\nsys.exit(main())", "run"]
STORE_BYTES = 100 * 2**20
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def main() -> int:
    """Print what the runs say; return 1 when one does not end as it must."""
    from piper_core.program.strategy import dump
    from tests.ray.strategies import pipeline

    with tempfile.TemporaryDirectory(prefix="two-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        config, file, kept = root / "config.json", root / "two.yaml", root / "kept"
        config.write_text(json.dumps(CONFIG))
        strategy = pipeline()
        dump(replace(strategy, header=replace(strategy.header, model=str(config), cluster="cpu")), file)
        cluster, second = _two_nodes(root)
        try:
            known = [str(file), "--address", cluster.address, "--json"]
            first = _json([*known, "--check", "--save", str(kept), "--steps", "3"])
            assert len(first["check"]) == 3
            again = _json([*known, "--load", str(kept), "--dtype", "float64", "--steps", "2"])
            whole = max(end_s for lane in first["timeline"] for _, end_s, _ in lane["events"])
            print(f"3 steps equal one process's, losses {first['losses']}; timeline of {whole:.4f} s", flush=True)
            assert whole < 2 * first["step_times_s"][-1], "the nodes' clocks were not brought together"
            print(f"2 more from the checkpoint, losses {again['losses']}", flush=True)
            status, last = _lost([*known[:-1], "--steps", "100000", "--timeout", "20s"], cluster, second)
            print(f"a node lost: exit {status}, {last}", flush=True)
            assert status == 2
            assert re.search(r"rank [01] at .*", last), last
        finally:
            cluster.shutdown()
    return 0


def _two_nodes(root: Path) -> tuple[Any, Any]:
    """Start a head and another node; return the cluster and the second node."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # benchmarks are held to one core; nodes take all
    os.environ |= {"RAY_TMPDIR": str(root), "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
    (root / "ray").mkdir()
    from ray.cluster_utils import Cluster

    made: Any = Cluster  # Ray's stubs say nothing of it
    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = made(initialize_head=True, connect=False, head_node_args={**options, "include_dashboard": False})
    return cluster, cluster.add_node(**options)


def _json(words: list[str]) -> dict[str, Any]:
    done = subprocess.run([*RUN, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def _lost(words: list[str], cluster: Any, node: Any) -> tuple[int, str]:
    """End a node after a run's second step; return the run's status and the last line of its errors."""
    with subprocess.Popen([*RUN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1"):
                break
        cluster.remove_node(node, allow_graceful=False)
        _, errors = process.communicate(timeout=200)
    return process.returncode, errors.strip().splitlines()[-1]
