"""The README's example: a program of ten lines, its grid, and an edit that is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

from piper_core.program.strategy import load
from search.cli import main

ROOT = Path(__file__).parents[3]
TEN_LINES = ROOT / "tests" / "golden" / "readme" / "ten_lines.yaml"
BEFORE, AFTER = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"


def snippet(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the example as Markdown."""
    text = TEN_LINES.read_text()
    path = folder / "ten_lines.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 0
    good = capsys.readouterr().out.replace(f"{folder}/", "").splitlines()
    path.write_text(text.replace(BEFORE, AFTER))
    assert main(["check", str(path)]) == 2
    bad = capsys.readouterr()
    lines = difflib.unified_diff(text.splitlines(), path.read_text().splitlines(), lineterm="", n=0)
    edit = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    untimed = [line for line in good if " compiled in " not in line]
    parts = [
        ("yaml", [f"# {path.name}", *text.splitlines()]),
        ("", [f"$ piper-search check {path.name}", *untimed]),
        ("diff", edit),
        ("", [f"$ piper-search check {path.name}", *bad.out.splitlines(), *bad.err.splitlines()]),
    ]
    return "\n\n".join("\n".join([f"```{kind}", *body, "```"]) for kind, body in parts)


def test_ten_lines() -> None:
    lines = TEN_LINES.read_text().splitlines()
    assert len(lines) <= 13
    assert len(load(TEN_LINES).program.directives) == 6


def test_example(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the README shows is what the command prints."""
    made = snippet(tmp_path, capsys)
    golden("readme/snippet.md", made)
    readme = (ROOT / "README.md").read_text()
    if TEN_LINES.name not in readme:
        pytest.skip("the README does not show the example yet")
    for block in made.split("\n\n"):
        assert block in readme
