"""The README: its commands print what it shows, its snippets run, and its tables leave nothing out.

In the README, a block that starts with ``$ `` is a command and its output; a ``yaml`` block whose first line is
``# name.yaml``, or one called ``json name.json``, is a file that the commands after it read; a ``diff`` edits the file
written last, until the section ends; a ``python`` block prints the ``text`` block that follows. ``...`` stands for
anything. Numbers with a decimal point and timings are not compared.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path

import pytest

from piper_core import FAMILIES
from piper_core.directives import OPS, parse_directive
from piper_core.errors import DirectiveError
from piper_core.names import Sync
from piper_core.program.strategy import Header, load
from search.cli import main
from search.cli.app import DEFAULTS, parser
from search.report.table import COLUMNS
from search.space import _SHORT, FIXABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEN_LINES = ROOT / "tests" / "golden" / "readme" / "ten_lines.yaml"
BEFORE, AFTER = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"
COMMANDS = {"piper-search": "search.cli", "piper-profile": "profiler.cli"}


@dataclass(frozen=True)
class Block:
    """A fenced block: the section that it is in, what its fence says, and its text."""

    section: str
    info: str
    text: str

    @property
    def file(self) -> str:
        """The name of the file that it shows, if it shows one."""
        named = re.match(r"# (\S+\.yaml)\n", self.text) if self.info == "yaml" else re.match(r"json (\S+)", self.info)
        return named[1] if named else ""


def blocks() -> Iterator[Block]:
    for part in re.split(r"(?m)^## ", README):
        section = part.splitlines()[0]
        for fence in re.finditer(r"(?ms)^```([^\n]*)\n(.*?)^```$", part):
            yield Block(section, fence[1], fence[2])


BLOCKS = tuple(blocks())
SECTIONS = tuple(dict.fromkeys(b.section for b in BLOCKS if b.text.startswith("$ ") or b.info == "python"))


def run(words: list[str], folder: Path) -> str:
    """Return what a command prints, errors after the rest."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


def command(line: str, folder: Path) -> str:
    name, *words = shlex.split(line)
    return run(["-c", f"import sys\nfrom {COMMANDS[name]} import main\nsys.exit(main())", *words], folder)


def comparable(text: str) -> str:
    """Leave out blank lines, trailing blanks, timings and numbers with a decimal point."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and " compiled in " not in line]
    return re.sub(r"\d+\.\d+", "0.0", "\n".join(lines)) + "\n"


def expect(shown: str, printed: str) -> None:
    want, got = comparable(shown), comparable(printed)
    if not OutputChecker().check_output(want, got, ELLIPSIS):
        diff = difflib.unified_diff(want.splitlines(), got.splitlines(), "README.md", "this run", lineterm="")
        pytest.fail("\n".join(diff), pytrace=False)


def shape(text: str) -> list[str]:
    """Return the lines that every search prints, less what depends on costs and time."""
    kept = []
    for line in comparable(text).splitlines():
        if re.match(r" *\d+  ", line) or "──" in line:  # a candidate
            continue
        head = re.match(r"( *#.*|space: N = [\d,]+ |[a-z][^\d]*|\S+ .*(?= wins: ))", line)
        built = re.search(r"lowered and simulated(?= \(\d+ with the list scheduler's order\);|;)", line)
        kept.append(built[0] if built else "headline" if " wins: " in line else head[0] if head else line)
    return [re.sub(" +", " ", line) for line in kept]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_shown_is_what_happens(section: str, tmp_path: Path) -> None:
    for block in BLOCKS:  # files are there whatever section shows them, as they are shown first
        if block.file and not (tmp_path / block.file).exists():
            (tmp_path / block.file).write_text(block.text)
    mine = [block for block in BLOCKS if block.section == section]
    last = Path()
    for i, block in enumerate(mine):
        if block.file:
            last = tmp_path / block.file
        elif block.info == "diff":
            old, new = (re.findall(rf"(?m)^{sign}(.*)$", block.text) for sign in (r"-", r"\+"))
            text = last.read_text()
            assert len(old) == len(new)
            for a, b in zip(old, new, strict=True):
                assert text.count(a) == 1
                text = text.replace(a, b)
            last.write_text(text)
        elif block.text.startswith("$ "):
            line, _, shown = block.text[2:].partition("\n")
            if " wins: " in shown:
                assert shape(command(f"{line} --budget 2", tmp_path)) == shape(shown)
            else:
                expect(shown, command(line, tmp_path))
        elif block.info == "python":
            assert mine[i + 1].info == "text"
            expect(mine[i + 1].text, run(["-c", block.text], tmp_path))


def test_written_strategy() -> None:
    """The strategy that the README shows has the fields and the directives that one has."""
    (shown,) = (b.text for b in BLOCKS if b.info == "yaml" and "predicted:" in b.text)
    names = re.findall(r"(?m)^(\w+):", shown)
    assert set(names) <= {*(f.name for f in fields(Header)), "directives"}
    assert set(re.findall(r"op: (\w+)", shown)) <= set(OPS)


# --- the example ---


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
    assert len(TEN_LINES.read_text().splitlines()) <= 13
    assert len(load(TEN_LINES).program.directives) == 6


def test_example(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the README shows is what the command prints."""
    made = snippet(tmp_path, capsys)
    golden("readme/snippet.md", made)
    for block in made.split("\n\n"):
        assert block in README


# --- nothing left out ---


def table(first: str) -> dict[str, list[str]]:
    """Return the rows of the table whose header begins so: the other cells by the first."""
    lines = README.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows: dict[str, list[str]] = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def test_options() -> None:
    options = {text for action in parser()._actions for text in action.option_strings if text.startswith("--")}
    shown = {re.match(r"`(--[\w-]+)", name)[1] for name in table("option")}  # type: ignore[index]  # always matches
    assert shown == options - {"--help"}
    defaults = {f"--{name.replace('_', '-')}": value for name, value in DEFAULTS.items()}
    for name, (default, *_) in table("option").items():
        if re.match(r"`(--cluster|--global-batch|--seq-len|--top|--seed) ", name):
            assert default == str(defaults[name.split()[0].strip("`")])


def test_axes() -> None:
    assert {name: cells[0] for name, cells in table("`--fix` name").items()} == {
        name: next((short for short, long in _SHORT.items() if long == name), "") for name in FIXABLE
    }


def test_columns() -> None:
    shown = [name for cell in table("column") for name in re.split(", ", cell)]
    assert shown == [name for name in COLUMNS if name != "#"]


def test_directives() -> None:
    rows = table("op")
    assert list(rows) == [f"{op}+" if op in ("stage", "recompute") else op for op in OPS]
    for op, (cells, *_) in rows.items():
        with pytest.raises(DirectiveError) as caught:
            parse_directive({"op": op.rstrip("+"), "no such": 1})
        accepted = re.sub(r"^(fields|one of) ", "", caught.value.expected).split(", ")
        assert not [name for name in accepted if not re.search(rf"\b{name}\b", cells)], op


def test_families_and_their_limits() -> None:
    rows = table("family")
    assert list(rows) == list(FAMILIES)
    for name, (p, v, m, *_) in rows.items():
        family = FAMILIES[name]
        assert (p == "even") == (3 not in family.degrees())
        assert (v == ">= 2") == (3 in family.virtual_stages(4))
        assert v == ">= 2" or v == str(family.virtual_stages(4)[0])
        legal = family.microbatches(4, family.virtual_stages(4)[0])
        assert (m == "any") == (1 in legal)
        assert ("even" in m) == (9 not in legal and 10 in legal)


def test_reasons() -> None:
    source = "".join(path.read_text() for path in (ROOT / "piper_core" / "schedule").glob("verify*.py"))
    raised = set(re.findall(r'error\(\s*"(\w+)"', source)) | set(re.findall(r'reason = "(\w+)"', source))
    assert set(table("reason")) == raised


def test_header_fields() -> None:
    shown = {name for cell in table("header field") for name in cell.split(", ")}
    assert shown == {each.name for each in fields(Header)}
    assert all(f"`{sync}`" in table("header field")["sync"][0] for sync in Sync)


def test_links() -> None:
    anchors = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"(?m)^#+ (.*)$", README)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target in anchors if target.startswith("#") else (ROOT / target).exists()
