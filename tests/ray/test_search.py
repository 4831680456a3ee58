"""A search whose configurations are scored on a Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from piper_core.runtime.ray_session import RaySession
from search.engine import search
from tests.null.search.spaces import DENSE, case

FIX = ["pp=2", "b=1", "zero=1", "recompute=none", "schedule=1f1b,zbv", "cp=1", "outer=pp"]


def test_a_cluster_gives_the_answer_that_this_machine_gives(cluster: RaySession) -> None:
    it = case(DENSE, "p4d", 8, 16, 512, FIX)
    here = search(it.problem, it.space, budget_s=1e6, workers=1)
    there = search(it.problem, it.space, budget_s=1e6, address=cluster.address)
    assert there.stopped == here.stopped == "proved"
    assert [(c.config, c.score) for c in there.candidates] == [(c.config, c.score) for c in here.candidates]
    assert (there.simulated, there.pruned) == (here.simulated, here.pruned)
    assert cluster.alive()


def test_nothing_answers_at_the_address(tmp_path: Path) -> None:
    program = "import sys; from search.cli import main; sys.exit(main())"
    words = ["--model", "tiny-llama", "--gpus", "2", "--address", "127.0.0.1:1", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("--address 127.0.0.1:1: no Ray head answers there; "
                                                 "ray start --head starts one")  # fmt: skip
