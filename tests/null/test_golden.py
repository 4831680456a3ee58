"""The ``golden`` fixture compares, rejects and updates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TEST = 'def test_text(golden):\n    golden("deep/sample.txt", "one\\n{word}")\n'


def run(root: Path, word: str, *options: str) -> subprocess.CompletedProcess[str]:
    (root / "test_sample.py").write_text(TEST.format(word=word))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(root)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_golden_is_written_then_compared(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    missing = run(tmp_path, "two")
    assert missing.returncode == 1
    assert "no golden file deep/sample.txt" in missing.stdout
    assert run(tmp_path, "two", "--update-golden").returncode == 0
    assert [p.name for p in (tmp_path / "golden" / "deep").iterdir()] == ["sample.txt"]
    assert run(tmp_path, "two").returncode == 0
    changed = run(tmp_path, "three")
    assert changed.returncode == 1
    assert "-two" in changed.stdout
    assert "+three" in changed.stdout
