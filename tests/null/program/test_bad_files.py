"""Whatever is wrong with a file, one line says what and where, before it costs anything."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_core.errors import DirectiveError, PiperError, ProgramError
from piper_core.program.read import MAX_BYTES, read_document
from piper_core.program.strategy import load, loads
from tests.null.program.helpers import stopped_at_most

FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty, expected a list of directives"),
    "whitespace": (b" \n\t \n", "the file is empty"),
    "only a comment": (b"# nothing\n", "the file is empty"),
    "byte order mark alone": (b"\xef\xbb\xbf", "the file is empty"),
    "a number": (b"5", "neither a list nor a mapping, expected a list of directives, or a header"),
    "null": (b"null", "neither a list nor a mapping"),
    "a text": (b'"place"', "neither a list nor a mapping, expected"),
    "prose": (b"place stage zero on rank zero", "neither a list nor a mapping"),
    "too large": (b"[" + b" " * MAX_BYTES + b"]", "the file is too large, expected at most 8 MB"),
    "json too deep": (b"[" * 65 + b"]" * 65, "line 1: nested too deep, expected at most 64 levels"),
    "json deep without end": (b"[" * 2_000_000, "nested too deep"),
    "json objects too deep": (b'{"a":\n' * 65, "line 65: nested too deep"),
    "yaml flow too deep": (b"a: " + b"[" * 65, "line 1: nested too deep"),
    "yaml blocks too deep": (b"".join(b" " * i + b"a:\n" for i in range(80)), "line 65: nested too deep"),
    "yaml dashes too deep": (b"- " * 65 + b"a", "line 1: nested too deep"),
    "truncated": (b'[{"op": "place", "filter": {"PP"', "line 1 column 33: cannot be read as JSON: Expecting"),
    "two values": (b'[] []', "line 1 column 4: cannot be read as JSON: Extra data"),
    "unterminated text": (b'["place', "cannot be read as JSON: Unterminated string"),
    "yaml garbage": (b"a: [1, 2\nb: }", "cannot be read as YAML"),
    "yaml tabs": (b"a:\n\t- b", "line 2 column 1: cannot be read as YAML"),
    "yaml control character": (b"a: \x01", "cannot be read as YAML: special characters are not allowed"),
    "yaml escape": (b'a: "\\UFFFFFFFF"', "cannot be read as YAML"),
    "yaml indentation": (b"a: 1\n  b: 2", "line 2 column 4: cannot be read as YAML"),
    "nul byte": (b"[\0]", "a NUL byte at byte 1, expected UTF-8 text"),
    "utf-16": ("[]".encode("utf-16"), "a NUL byte"),
    "latin-1": (b'["\xe9"]', "byte 2 is not UTF-8"),
    "binary": (bytes(range(1, 256)), "is not UTF-8"),
    "json duplicate": (b'{"gpus": 8,\n "model": "a",\n "gpus": 8}', "line 3: duplicate key 'gpus'"),
    "json duplicate inside": (b'[{"op": "place", "filter": {"PP": 0, "P\\u0050": 1}}]', "line 1: duplicate key 'PP'"),
    "yaml duplicate": (b"gpus: 8\nmodel: a\ngpus: 8\n", "line 3: duplicate key 'gpus'"),
    "yaml duplicate inside": (b"- op: place\n- {op: a, 'op': b}\n", "line 2: duplicate key 'op'"),
    "rows 0 and '0'": (b"- op: order\n  actions:\n    0: 0F0\n    '0': 0B0", "line 4: duplicate key '0'"),
    "json NaN": (b"[NaN]", "a number that is not finite, expected a finite number, found NaN"),
    "json infinity": (b"[-Infinity]", "a number that is not finite"),
    "json overflow": (b"[1e999]", "a number that is not finite, expected a finite number, found 1e999"),
    "json digits": (b"[" + b"9" * 5000 + b"]", "a number has too many digits"),
    "yaml nan": (b"a: .nan", "line 1: a number that is not finite"),
    "yaml infinity": (b"- 1\n- -.inf", "line 2: a number that is not finite"),
    "yaml overflow": (b"a: 1e999", "a number that is not finite"),
    "yaml alias bomb": (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 1: anchor &a, expected values written out"),
    "yaml alias": (b"a: *a", "line 1: alias *a"),
    "yaml tag": (b"a: !!python/object/apply:os.system [ls]", "expected plain values without tags"),
    "yaml own tag": (b"- !x {}", "line 1: tag !x"),
    "yaml key of lists": (b"? [1]\n: 2", "line 1: a key that is not text"),
    "yaml documents": (b"a: 1\n---\nb: 2", "line 2: a second document, expected one document"),
    "a lone directive": (b'{"op": "stage", "stages": 4}', "unknown header field 'op', expected one of model,"),
    "no directives": (b"model: llama9b\ngpus: 32\n", "field 'directives' is missing"),
    "directives a mapping": (b"directives: {op: stage}", "a program is not a list of directives"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "words"), FILES.values(), ids=FILES)
def test_a_bad_file_says_what_and_where(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "a.strategy.yaml"
    path.write_bytes(raw)
    start = time.perf_counter()
    with pytest.raises(PiperError) as caught:
        load(path)
    line = str(caught.value)
    assert words in line
    assert line.startswith(f"{path}: ") or "a program is not a list" in line
    assert "\n" not in line
    assert len(line) < 600
    assert time.perf_counter() - start < 30


def test_yaml_of_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML is read slowly, so there is a limit; a broken JSON file is still called that."""
    monkeypatch.setattr("piper_core.program.read.MAX_YAML_VALUES", 500)
    with pytest.raises(ProgramError, match="over 500 YAML values; write a program of this size as JSON"):
        read_document("- a\n" * 500)
    with pytest.raises(ProgramError, match="line 2 column 1: cannot be read as JSON"):
        read_document("[\n" + "a,\n" * 500 + "b]\n")
    assert len(read_document("[\n" + "1,\n" * 500 + "1]\n")) == 501


def test_a_directive_in_a_file_keeps_its_position(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("gpus: 2\ndirectives:\n  - {op: place, filter: {PP: 0}, devices: [0]}\n  - {op: plaice}\n")
    with pytest.raises(DirectiveError, match=r"directive 2 of 2, plaice\(\): unknown op 'plaice'"):
        load(path)


def test_a_json_file_must_be_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2,]")
    assert read_document(path.read_text()) == [1, 2]
    with pytest.raises(ProgramError, match=r"a\.json: line 1 column 7: cannot be read as JSON"):
        read_document(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "missing.yaml", "cannot read the file: No such file or directory"),
        (lambda folder: folder, "a directory, expected a strategy file"),
        (lambda folder: os.mkfifo(folder / "pipe") or folder / "pipe", "not a regular file"),
        (lambda folder: folder / "a\0b", "cannot read the file: embedded null byte"),
        (lambda folder: folder / ("a" * 300), "cannot read the file: File name too long"),
    ],
)
def test_what_is_not_a_file(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    with pytest.raises(ProgramError, match=words) as caught:
        load(make(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unit", ['"', '\\"', '"\\', "[]", "{}", "a: ", "- ", "? ", "'", "\n", "#", "%", "|\n", ": ",
                                  "&a ", "\t", ",", "---\n", "!", "@`", "[[1],", '{"a":{},'])  # fmt: skip
def test_no_repetition_hangs_the_reader(unit: str) -> None:
    for before in ("", "[", "{", "a: ", 'a: "', '["'):
        text = before + unit * (40_000 // len(unit))
        start = time.perf_counter()
        stopped_at_most(read_document, text)
        assert time.perf_counter() - start < 10


@settings(max_examples=300)
@given(st.text(max_size=200) | st.text("[]{}:,-\"'\\ \n#&*!|>%@`?ab01.", max_size=80))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    stopped_at_most(loads, text)
