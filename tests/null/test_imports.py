"""What must stay light: importing the language and the commands loads no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "optuna", "networkx", "pydantic")


def loaded_by(statement: str) -> set[str]:
    """Return which heavy libraries a fresh interpreter has loaded after the statement."""
    program = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


def test_a_heavy_import_would_be_seen() -> None:
    assert "networkx" in loaded_by("import networkx")


@pytest.mark.parametrize(
    "module",
    [
        "piper_core",
        "piper_core.arch",
        "piper_core.ir",
        "piper_core.directives",
        "piper_core.passes",
        "piper_core.program",
        "piper_core.schedule",
        "search",
        "search.cli",
        "profiler",
        "profiler.cli",
    ],
)
def test_import_is_light(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("module", ["search.cli", "profiler.cli"])
def test_help_is_light(module: str) -> None:
    call = (
        f"import contextlib\nfrom {module} import main\n"
        "sys.argv = ['command', '--help']\nwith contextlib.suppress(SystemExit):\n    main()"
    )
    assert loaded_by(call) == set()
