"""Change values inside a YAML text and leave every other character alone: comments, key order, layout.

The text is composed to nodes that know where they stand; where the new data differ from the old, the text of the
smallest value that differs is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from piper_core.errors import ProgramError
from piper_core.program.read import read_document
from piper_core.program.write import flow

_ORDER_ROW = re.compile(r"\(?\d+[A-Z]+\d[\w() ]*")
_COMMENT = re.compile(r"(?:^|\s)#", re.MULTILINE)

Edit = tuple[int, int, str]
"""Replace text[start:end]."""


def edit_yaml(text: str, new: Mapping[str, Any]) -> str:
    """Return the text with its data turned into ``new``.

    Raises:
        ProgramError: a comment stands inside a value that must be rewritten.
    """
    from ruamel.yaml import YAML

    old = read_document(text)
    edits = sorted(_Editor(text).edits(YAML(typ="safe", pure=True).compose(text), old, new))
    for start, end, replacement in reversed(edits):
        text = text[:start] + replacement + text[end:]
    if read_document(text) != json.loads(json.dumps(new)):
        raise ProgramError("the file cannot be edited in place", expected="plain YAML: no merge of styles in one value",
                           hint="write the result elsewhere with -o")  # fmt: skip
    return text


class _Editor:
    """Finds what to replace in one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def edits(self, node: Any, old: Any, new: Any) -> Iterator[Edit]:
        """Yield what turns the text of a node, which reads as ``old``, into ``new``."""
        if old == new and type(old) is type(new):
            return
        if isinstance(old, dict) and isinstance(new, Mapping):
            yield from self._mapping(node, old, new)
        elif isinstance(old, list) and isinstance(new, Sequence) and not isinstance(new, str):
            yield from self._sequence(node, old, list(new))
        else:
            yield self._whole(node, _scalar(new, plain=node.id == "scalar" and node.style is None))

    def _whole(self, node: Any, replacement: str) -> Edit:
        """Replace a scalar, or what stands in one pair of brackets.

        Raises:
            ProgramError: it holds a comment, or is a block of lines.
        """
        start, end = node.start_mark.index, self._end(node)
        if node.id != "scalar" and (not node.flow_style or _COMMENT.search(self.text[start:end])):
            raise ProgramError(
                f"line {node.start_mark.line + 1}: this value must be rewritten, and holds comments or spans lines",
                expected="it on one line, without comments inside",
            )
        return start, end, replacement

    def _mapping(self, node: Any, old: dict[str, Any], new: Mapping[str, Any]) -> Iterator[Edit]:
        pairs = {key.value: (key, value) for key, value in node.value}
        gone = [name for name in old if name not in new]
        more = [name for name in new if name not in old]
        if node.flow_style and (gone or more or not _COMMENT.search(self._text(node))):
            yield self._whole(node, flow(dict(new)))
            return
        for name in old:
            if name in new:
                yield from self.edits(pairs[name][1], old[name], new[name])
        for name in gone:
            yield self._lines(pairs[name][0], pairs[name][1])
        if more:
            last_key, last_value = node.value[-1]
            indent = " " * last_key.start_mark.column
            at = self._line_end(last_value)
            yield at, at, "".join(f"\n{indent}{flow(name)}: {_scalar(new[name], plain=True)}" for name in more)

    def _sequence(self, node: Any, old: list[Any], new: list[Any]) -> Iterator[Edit]:
        if node.flow_style:
            if len(old) == len(new) and any(isinstance(item, dict | list) for item in old):
                for item, before, after in zip(node.value, old, new, strict=True):
                    yield from self.edits(item, before, after)
            else:
                yield self._whole(node, flow(new))
            return
        before, after = ([_label(item) for item in items] for items in (old, new))
        for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            both = min(b - a, d - c) if tag == "equal" or _alike(old[a:b], new[c:d]) else 0
            for i in range(both):
                yield from self.edits(node.value[a + i], old[a + i], new[c + i])
            for i in range(a + both, b):
                yield self._lines(node.value[i], node.value[i], dash=True)
            if c + both < d:
                if not a + both:
                    raise ProgramError("nothing stands before what must be inserted", hint="put a directive first")
                at = self._line_end(node.value[a + both - 1])
                dash = " " * self._dash(node.value[0])
                yield at, at, "".join(f"\n{dash}- {flow(item)}" for item in new[c + both : d])

    def _lines(self, first: Any, last: Any, *, dash: bool = False) -> Edit:
        """Remove the lines of a key or an item; a comment behind it stays, on a line of its own."""
        start, end = first.start_mark.index, self._end(last)
        begin = self.text.rfind("\n", 0, start) + 1
        if self.text[begin:start].strip(" -" if dash else " "):
            raise ProgramError(
                f"line {first.start_mark.line + 1}: cannot be removed alone", expected="a line of its own"
            )
        if _COMMENT.search(self.text[start:end]):
            raise ProgramError(f"line {first.start_mark.line + 1}: a value with comments inside must go",
                               expected="the comments outside of it")  # fmt: skip
        stop = self.text.find("\n", end)
        rest = self.text[end : len(self.text) if stop < 0 else stop].strip()
        after = len(self.text) if stop < 0 else stop + 1
        return begin, after, f"{' ' * first.start_mark.column}{rest}\n" if rest else ""

    def _dash(self, item: Any) -> int:
        """Return the column of the dash before an item."""
        begin = self.text.rfind("\n", 0, item.start_mark.index) + 1
        return self.text.index("-", begin) - begin

    def _end(self, node: Any) -> int:
        """Return where a node's own text ends: a block's mark lies behind the comments that follow it."""
        if node.id == "scalar" or node.flow_style or not node.value:
            return int(node.end_mark.index)
        last = node.value[-1]
        return self._end(last[1] if isinstance(last, tuple) else last)

    def _line_end(self, node: Any) -> int:
        """Return the end of the last line of a node, behind a comment that follows it."""
        at = self.text.find("\n", self._end(node))
        return len(self.text) if at < 0 else at

    def _text(self, node: Any) -> str:
        return self.text[node.start_mark.index : self._end(node)]


def _label(item: Any) -> str:
    """Return what items of two lists are matched by: the op of a directive, else the whole."""
    return str(item["op"]) if isinstance(item, dict) and "op" in item else json.dumps(item)


def _alike(old: list[Any], new: list[Any]) -> bool:
    """Return whether values can turn into one another in place: none of them is a directive."""
    return not any(isinstance(item, dict) and "op" in item for item in (*old, *new))


def _scalar(value: Any, *, plain: bool) -> str:
    """Return a value's text; an order row stays without quotes where the old one had none."""
    if plain and isinstance(value, str) and _ORDER_ROW.fullmatch(value):
        return value
    return flow(value)
