"""Traces kept on disk: an answer is given again only while everything it came from is as it was.

A key holds the model's definition and shapes, torch's version, ours, and the text of the modules that make a trace. An
entry of a person's own file also lists the files that were read to make it, with hashes; a changed one voids it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from piper_core.frontend.table import Trace

_ROOT = Path(__file__).parents[1]
_SOURCES = ("arch", "frontend", "models")


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of traces; None keeps nothing."""

    folder: Path | None

    @staticmethod
    def default() -> Cache:
        """Return the person's cache: ``$PIPER_CACHE`` ("" for none), else under ``$XDG_CACHE_HOME`` or ~/.cache."""
        named = os.environ.get("PIPER_CACHE")
        if named is not None:
            return Cache(Path(named) if named else None)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Cache(Path(home) / "piper-search" / "traces")

    def get(self, key: Mapping[str, Any], make: Callable[[], Trace]) -> Trace:
        """Return the trace kept under ``key``, or make and keep it."""
        if self.folder is None:
            return make()
        text = json.dumps({**key, **_versions()}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        known = _read(path, text)
        if known is not None:
            return known
        with _reading() as files:
            trace = make()
        _write(path, {"key": text, "files": _hashes(files) if "file" in key else {}, "trace": trace.to_data()})
        return trace


def _versions() -> dict[str, str]:
    """Return what else a trace depends on."""
    found = {"python": sys.version.split()[0], "source": _source()}
    for package in ("torch", "piper-search"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _source() -> str:
    """Return a hash of the text of our modules that make traces."""
    made = hashlib.sha256()
    for package in _SOURCES:
        for path in sorted((_ROOT / package).glob("*.py")):
            made.update(path.read_bytes())
    return made.hexdigest()[:16]


def _read(path: Path, key: str) -> Trace | None:
    """Return an entry that is whole and still true."""
    try:
        entry = json.loads(path.read_bytes())
        if entry["key"] != key or any(_state(*each) != each[1] for each in entry["files"].items()):
            return None
        return Trace.from_data(entry["trace"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, cut short or from another hand
        return None


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry whole or not at all; a folder that cannot be written is no reason to fail."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(entry), encoding="utf-8")
        scratch.replace(path)


_opened: set[str] | None = None
_listens = False


@contextmanager
def _reading() -> Iterator[set[str]]:
    """Collect the files that are opened or imported inside."""
    global _opened, _listens
    if not _listens:  # a hook cannot be removed; this one is idle outside
        sys.addaudithook(_audit)
        _listens = True
    before = set(sys.modules)
    found: set[str] = set()
    _opened = found
    try:
        yield found
    finally:
        _opened = None
        for name in set(sys.modules) - before:
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str):
                found.add(file)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str):
        _opened.add(arguments[0])


def _hashes(files: Iterable[str]) -> dict[str, str]:
    """Return the state of the files that a person's model came from: text of their own, size and date of libraries'.

    The interpreter's, torch's and our own are left out: the key has their versions.
    """
    paths = sysconfig.get_paths()
    libraries = tuple(str(Path(paths[kind]).resolve()) + os.sep for kind in ("purelib", "platlib"))
    skipped = (
        "/proc/", "/sys/", "/dev/", "/etc/", str(Path(paths["stdlib"]).resolve()) + os.sep + "lib-dynload",
        *(str(_ROOT.parent / each) + os.sep for each in ("piper_core", "profiler", "search")),
        *(f"{each}torch{os.sep}" for each in libraries),
    )  # fmt: skip
    standard = str(Path(paths["stdlib"]).resolve()) + os.sep
    made = {}
    for path in sorted({Path(name).resolve() for name in files}):
        text = str(path)
        library = text.startswith(libraries)
        if text.startswith(skipped) or text.endswith(".pyc") or (text.startswith(standard) and not library):
            continue
        if path.is_file():
            made[text] = _stamp(path) if library else _hash(path)
    return made


def _state(name: str, before: str) -> str:
    """Return the state of a file in the form that it was kept in."""
    return _stamp(Path(name)) if before.startswith("@") else _hash(Path(name))


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"@{found.st_size}:{found.st_mtime_ns}"


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
