"""The text of a strategy file with another program in it: what a person wrote around it stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from piper_core.directives import parse_directive
from piper_core.program.program import Program
from piper_core.program.read import read_document
from piper_core.program.strategy import Strategy
from piper_core.program.write import describe, to_json
from profiler.spec import Cluster
from search.candidate import Score
from search.price import predicted_of
from search.pricing import SAID
from search.refine.edit_yaml import edit_yaml


def rewritten(
    source: Path, strategy: Strategy, score: Score, cluster: Cluster, by: Mapping[str, Any] | None = None
) -> str:
    """Return the text of a file with another program and its price, and ``by`` what that is: comments and the order of
    keys stay as they were.

    Raises:
        ProgramError: a comment stands inside a value that must change.
    """
    text = source.read_text(encoding="utf-8")
    old = read_document(text)
    assert isinstance(old, dict), "a bare array names no cluster"
    data = strategy.to_data()
    before = Strategy.parse(old)
    changed = {name for name in data if getattr(before.header, name, None) != getattr(strategy.header, name, None)}
    new = {name: data[name] if name in changed else value for name, value in old.items()}
    new |= {name: data[name] for name in ("mesh", "schedule", "micro_batch") if name in changed and name not in new}
    new["directives"] = _same_form(old["directives"], data["directives"])
    kept = {name: value for name, value in (old.get("predicted") or {}).items() if name not in SAID}
    new["predicted"] = kept | predicted_of(score, cluster, by)
    if _is_json(text):
        header = {name: value for name, value in new.items() if name != "directives"}
        return to_json(header, strategy.program.directives)
    return _described(edit_yaml(text, new), before.program, strategy.program)


def _described(text: str, old: Program, new: Program) -> str:
    """Return the text with the comments that a search wrote on its blocks brought up to date; a person's stay."""
    said = [{op: describe(list(block)) for op, block in groupby(program.directives, type)} for program in (old, new)]
    for op, words in said[0].items():
        line = f"# {words}\n"
        if op in said[1] and text.count(line) == 1:
            text = text.replace(line, f"# {said[1][op]}\n")
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _same_form(old: list[object], new: list[object]) -> list[object]:
    """Return new directives, those in the file already as it says them, order of keys included."""
    known = {str(parse_directive(item).to_data()): item for item in old}
    return [known.get(str(item), item) for item in new]
