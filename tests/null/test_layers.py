"""Imports go one way: import-linter's contracts hold, and each of them can reject."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("piper_core", "profiler", "search")
LAYERS = (
    "runtime",
    "frontend",
    "models",
    "schedule",
    "program",
    "directives",
    "passes",
    "ir",
    "arch",
    "mesh",
    "names",
    "errors",
    "jit",
)


def lint(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", *options],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def skeleton(root: Path, *imports: tuple[str, str]) -> Path:
    """Write empty packages under the project's own contracts, then one import statement a module named."""
    shutil.copy(ROOT / "pyproject.toml", root)
    packages = ["piper_core", *(f"piper_core.{layer}" for layer in LAYERS), "profiler", "profiler.measure"]
    for package in [*packages, "search", "search.generators", "search.cli"]:
        folder = root.joinpath(*package.split("."))
        folder.mkdir()
        (folder / "__init__.py").touch()
    for module, statement in imports:
        path = root.joinpath(*module.split("."))
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).write_text(statement + "\n")
    return root


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_is_a_package() -> None:
    """import-linter looks past a folder that has no ``__init__.py``."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    folders = {path.parent for path in modules} | {ROOT / package for package in PACKAGES}
    bare = sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists())
    assert not bare, f"no __init__.py in {', '.join(bare)}"


def test_imports_down_the_layers_are_kept(tmp_path: Path) -> None:
    down = [(f"piper_core.{upper}.a", f"import piper_core.{lower}") for upper, lower in pairwise(LAYERS)]
    places = [
        ("piper_core.models", "import torch"),
        ("piper_core.frontend.b", "import torch.fx"),
        ("piper_core.runtime.b", "import torch, ray"),
        ("profiler.measure.a", "import torch"),
        ("search.generators.a", "import optuna, profiler.measure, piper_core.runtime"),
        ("search.cli", "import ray, profiler"),
    ]
    done = lint(skeleton(tmp_path, *down, *places))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        *((f"piper_core.{lower}", f"import piper_core.{upper}", "core") for upper, lower in pairwise(LAYERS)),
        ("piper_core.directives.stage", "from piper_core.schedule import plan", "core"),
        ("piper_core.extra", "", "core"),
        ("piper_core.ir", "import search", "packages"),
        ("piper_core.ir", "import profiler", "packages"),
        ("profiler.fit", "import search", "packages"),
        ("piper_core.ir.dag", "import torch", "torch"),
        ("profiler.fit", "import torch", "torch"),
        ("search.cli", "import torch", "torch"),
        ("piper_core.frontend", "import ray", "ray"),
        ("profiler.measure", "import ray", "ray"),
        ("search.cli", "import optuna", "optuna"),
        ("piper_core.program", "import optuna", "optuna"),
    ],
)
def test_contract_rejects(tmp_path: Path, module: str, statement: str, contract: str) -> None:
    done = lint(skeleton(tmp_path, (module, statement)), "--contract", contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 kept, 1 broken" in done.stdout
