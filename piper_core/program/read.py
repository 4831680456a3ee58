"""Read JSON or YAML as plain data; what cannot be a program is refused before it costs anything."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from piper_core.errors import ProgramError

Data: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_YAML_VALUES = 200_000
"""YAML is read at 20 microseconds a value: this many take four seconds. JSON has no such limit."""

_EXPECTED = "a list of directives, or a header with directives"

# Possessive, and at ease with a string that never ends: no text makes these quadratic.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_BRACKET = re.compile(rf"{_STRING}|[\[\]{{}}]", re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|[\[\]{{}}:\n]", re.DOTALL)
_INT = re.compile(r"[-+]?[0-9]{1,4000}|0o[0-7]{1,4000}|0x[0-9a-fA-F]{1,4000}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NAMED: dict[str, Data] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class _UnreadableError(ProgramError):
    """Text that is not in the format tried, or too much of it: another format may do."""


def read_document(source: Path | str) -> list[Any] | dict[str, Any]:
    """Return the list or mapping in a file (a ``Path``) or in a text (a ``str``).

    JSON is tried first, then YAML 1.2 reduced to what JSON can say: one document, keys that are text, and no
    tags, anchors or aliases. A file called ``.json`` must be JSON.

    Raises:
        ProgramError: no such file, over 8 MB, not UTF-8, a NUL byte, empty, over 64 deep, bad syntax, a
            duplicate key, a number that is not finite, or neither a list nor a mapping.
    """
    name = str(source) if isinstance(source, Path) else ""
    try:
        text = _decode(_file_bytes(source) if isinstance(source, Path) else source.encode("utf-8", "surrogatepass"))
        data = _parse(text, json_only=name.endswith(".json"))
        if not isinstance(data, list | dict):
            raise ProgramError("neither a list nor a mapping", expected=_EXPECTED, found=repr(data)[:60])
        return data
    except ProgramError as error:
        raise error.at(name) from None


def _file_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ProgramError("a directory", expected="a strategy file")
        if path.exists() and not path.is_file():
            raise ProgramError("not a regular file", expected="a strategy file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ProgramError(f"cannot read the file: {reason}", expected="a strategy file") from None


def _decode(raw: bytes) -> str:
    if len(raw) > MAX_BYTES:
        raise ProgramError("the file is too large", expected=f"at most {MAX_BYTES // 2**20} MB")
    if b"\0" in raw:
        raise ProgramError(f"a NUL byte at byte {raw.index(0)}", expected="UTF-8 text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProgramError(f"byte {error.start} is not UTF-8", expected="UTF-8 text") from None
    if not text.strip():
        _empty()
    return text


def _parse(text: str, *, json_only: bool) -> Data:
    if not json_only and text.lstrip()[0] not in "[{":
        return _yaml(text)
    try:
        return _json(text)
    except _UnreadableError as error:
        if json_only:
            raise
        try:
            return _yaml(text)
        except _UnreadableError:
            raise error from None


# --- JSON ---


def _json(text: str) -> Data:
    depth = 0
    for token in _BRACKET.finditer(text):
        if token[0] in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                _too_deep(text.count("\n", 0, token.start()) + 1)
        elif token[0] in ("]", "}"):
            depth -= 1

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            _twice(*_first_twice(text))
        return found

    try:
        data: Data = json.loads(text, object_pairs_hook=pairs, parse_constant=_not_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _UnreadableError(
            f"line {error.lineno} column {error.colno}: cannot be read as JSON: {error.msg}"
        ) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ProgramError("a number has too many digits", expected="at most 4000") from None
    return data


def _first_twice(text: str) -> tuple[str, int]:
    """Return the first key that an object of valid JSON repeats, and its line."""
    line, last = 1, ""
    seen: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                seen.append(set())
            case "]" | "}":
                seen.pop()
            case "\n":
                line += 1
            case ":":
                key = json.loads(last)
                if key in seen[-1]:
                    return key, line
                seen[-1].add(key)
            case word:
                last = word
    raise AssertionError("no key is repeated")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


# --- YAML ---


def _yaml(text: str) -> Data:
    # Imported here: most documents are JSON, and the import takes 30 ms.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return _compose(YAML(typ="safe", pure=True).parse(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        at = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise _UnreadableError(f"{at}cannot be read as YAML: {what}") from None
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode
        raise _UnreadableError(f"cannot be read as YAML: {error}") from None


def _compose(events: Iterator[Any]) -> Data:
    """Build the data that a stream of parser events describes."""
    from ruamel.yaml import events as kinds

    root: list[Data] = []
    holders: list[list[Any] | dict[str, Any]] = [root]
    keys: list[str | None] = [None]  # of each mapping held: the key that waits for its value
    for count, event in enumerate(events):
        line = event.start_mark.line + 1
        if count > MAX_YAML_VALUES:
            raise _UnreadableError(f"over {MAX_YAML_VALUES} YAML values", hint="write a program of this size as JSON")
        value: Any
        match event:
            case kinds.AliasEvent():
                raise ProgramError(f"line {line}: alias *{event.anchor}"[:80], expected="values written out")
            case kinds.SequenceEndEvent() | kinds.MappingEndEvent():
                holders.pop()
                keys.pop()
                continue
            case kinds.ScalarEvent():
                _no_properties(event, line)
                # A key is its text, so that YAML's 0: and JSON's "0": are one.
                as_text = isinstance(holders[-1], dict) and keys[-1] is None
                value = event.value if as_text or not event.implicit[0] else _scalar(event.value, line)
            case kinds.SequenceStartEvent():
                _no_properties(event, line)
                value = []
            case kinds.MappingStartEvent():
                _no_properties(event, line)
                value = {}
            case kinds.DocumentStartEvent():
                if root:
                    raise ProgramError(f"line {line}: a second document", expected="one document")
                continue
            case _:
                continue
        holder = holders[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif (key := keys[-1]) is not None:
            holder[key], keys[-1] = value, None
        elif not isinstance(value, str):
            raise ProgramError(f"line {line}: a key that is not text", found=repr(value))
        elif value in holder:
            _twice(value, line)
        else:
            keys[-1] = value
        if isinstance(value, list | dict):
            holders.append(value)
            keys.append(None)
            if len(holders) > MAX_DEPTH + 1:
                _too_deep(line)
    if not root:
        _empty()
    return root[0]


def _no_properties(event: Any, line: int) -> None:
    """Refuse tags (they can name any type) and anchors (aliases can make a small file huge)."""
    if event.tag is not None:
        raise ProgramError(f"line {line}: tag {event.tag}"[:80], expected="plain values without tags")
    if event.anchor is not None:
        raise ProgramError(f"line {line}: anchor &{event.anchor}"[:80], expected="values written out")


def _scalar(text: str, line: int) -> Data:
    """Return what a plain scalar means in the core schema of YAML 1.2."""
    if text in _NAMED:
        return _NAMED[text]
    if _INT.fullmatch(text):
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
        return value
    if _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
        _not_finite(text, line)
    return text


# --- what both refuse ---


def _empty() -> NoReturn:
    raise ProgramError("the file is empty", expected=_EXPECTED)


def _twice(key: str, line: int) -> NoReturn:
    raise ProgramError(f"line {line}: duplicate key {key[:60]!r}", expected="each key once")


def _too_deep(line: int) -> NoReturn:
    raise ProgramError(f"line {line}: nested too deep", expected=f"at most {MAX_DEPTH} levels")


def _not_finite(text: str, line: int = 0) -> NoReturn:
    at = f"line {line}: " if line else ""
    raise ProgramError(f"{at}a number that is not finite", expected="a finite number", found=text[:40])
