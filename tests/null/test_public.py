"""The public names of ``piper_core``: all there, none imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import piper_core

RUNTIME = {"AdamW", "Clip", "SGD", "Trainer"}  # they import torch; tests of the runtime use them


@pytest.mark.parametrize("name", sorted(set(piper_core.__all__) - RUNTIME))
def test_name_is_there(name: str) -> None:
    assert getattr(piper_core, name) is not None
    assert name in dir(piper_core)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = piper_core.nothing


def test_import_loads_nothing() -> None:
    program = "import sys\nimport piper_core\nprint('numpy' in sys.modules, 'piper_core.ir' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
