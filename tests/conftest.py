"""Shared by all tests: golden files and the settings of Hypothesis."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

os.environ["PIPER_PROFILES"] = os.devnull  # what a person has measured must not change what tests see

# No deadline, because a shared machine stalls; derandomized, so that a red run is red again when repeated.
# HYPOTHESIS_PROFILE=explore draws new examples each time.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the tests produce")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with ``tests/golden/<name>``: ``golden("1f1b-p4.txt", str(grid))``.

    With ``--update-golden`` the file is written instead, whole or not at all.
    """
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if not path.resolve().is_relative_to(GOLDEN.resolve()):
            raise ValueError(f"golden file {name!r} lies outside tests/golden")
        if not text.endswith("\n"):
            text += "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratch.write_text(text, encoding="utf-8", newline="\n")
            scratch.replace(path)
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}; write it with pytest --update-golden", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"golden/{name}", "this run", lineterm=""
            )
            pytest.fail("\n".join([*diff, "if this is meant: pytest --update-golden"]), pytrace=False)

    return compare
