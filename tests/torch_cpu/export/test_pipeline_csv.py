"""The exported CSV is loaded and run by torch's own pipeline runtime, with the gradients of autograd."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from search.export import exporter
from search.export.job import job_of
from tests.null.export.strategies import pipeline

SCRIPT = pipeline("zbv", 2, 4, 2, layers=[2, 1, 1, 1], model="dense:5")
CASES = (
    ("gpipe", 2, 3, 1, [1, 2]),
    ("1f1b", 2, 5, 1, [3, 1]),
    ("interleaved_1f1b", 2, 4, 2, [1, 1, 2, 1]),
    ("interleaved_1f1b", 2, 4, 3, [1, 1, 1, 1, 1, 1]),
    ("zb_h1", 2, 4, 1, [2, 2]),
    ("zb_h2", 2, 5, 1, [2, 2]),
    ("zbv", 2, 4, 2, [2, 1, 1, 1]),
    ("v_half", 2, 4, 2, [1, 1, 1, 2]),
    ("v_min", 2, 5, 2, [1, 1, 1, 1]),
    ("dualpipev", 2, 6, 2, [1, 1, 1, 1]),
)
"""(family, p, m, v, layers a stage)."""


@pytest.mark.slow
def test_torch_runs_the_schedule_with_right_gradients(tmp_path: Path) -> None:
    cases = []
    for i, (family, p, m, v, layers) in enumerate(CASES):
        job = job_of(pipeline(family, p, m, v, layers=layers, model=f"dense:{sum(layers)}"))
        file = tmp_path / f"{i}.csv"
        file.write_text(exporter("csv")(job).files["schedule.csv"])
        cases.append({"file": str(file), "layers": layers, "rows_of": job.rows_of, "microbatches": m})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = [sys.executable, "-m", "tests.torch_cpu.export.pipeline_rank"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), "2", str(tmp_path / "store"), str(tmp_path / "cases.json")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=180)
        assert rank.returncode == 0, err[-2000:]
        errors = json.loads(out)
        assert len(errors) == len(CASES)
        assert max(errors) < 1e-10, dict(zip(CASES, errors, strict=True))


@pytest.mark.slow
def test_the_exported_script_runs(tmp_path: Path) -> None:
    """What a person does with the files: torchrun, and the gradients are right."""
    for name, text in exporter("csv")(job_of(SCRIPT)).files.items():
        (tmp_path / name).write_text(text)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "run_schedule.py")]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    errors = dict(re.findall(r"rank (\d): .*? gradient (\S+)", done.stdout))
    assert set(errors) == {"0", "1"}, done.stdout
    assert max(map(float, errors.values())) < 1e-12
