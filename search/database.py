"""What a search has evaluated, kept in a file so that a killed search goes on where it was.

``candidates.jsonl``: the first line says what is searched, each further line one configuration and its score, or why
it was rejected. Lines are added batch by batch and forced to disk; a line that a kill cut short is dropped when the
file is read again. Since what a search asks for depends on nothing but the scores that it was told, going on is running
again with the known answers at hand, and ends where the uninterrupted search ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from piper_core.errors import ConfigError
from search.candidate import Outcome, Score
from search.space import Configuration

FILE = "candidates.jsonl"
FORMAT = 1


class Database:
    """The evaluations of one search, in the order in which they were made."""

    def __init__(self, path: Path, search: Mapping[str, Any], known: Mapping[Configuration, Outcome] | None) -> None:
        """``known`` is what the file holds; None: there is none yet, or that of an earlier run."""
        self.path, self.search, self.resumed = path, _normal(search), known is not None
        self.known = dict(known or {})
        self._made = self.resumed

    @classmethod
    def start(cls, folder: Path, search: Mapping[str, Any], *, replace: bool = False) -> Database:
        """Begin a new search in ``folder``, in place of what an earlier run of the same search left there, or of any
        search with ``replace``. Nothing is written before :meth:`begin`.

        Raises:
            ConfigError: the folder holds another search.
        """
        path = folder / FILE
        if path.exists() and not replace and _head(path) != _normal(search):
            raise ConfigError(f"{folder} holds another search ({differs(_head(path), search)}); name another --out")
        return cls(path, search, None)

    @classmethod
    def resume(cls, folder: Path, search: Mapping[str, Any]) -> Database:
        """Open the search that a run left in ``folder``.

        Raises:
            ConfigError: nothing there, not a search's file, or another search.
        """
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(
                f"--resume {folder}: there is no {FILE} in it; name the --out of an earlier search, or begin one with "
                f"--out {folder}"
            )
        head = _head(path)
        if head != _normal(search):
            raise ConfigError(f"--resume {folder} holds another search: {differs(head, search)}; give the "
                              "options that it was begun with, or name another folder")  # fmt: skip
        return cls(path, search, _whole(path))

    def further(self, number: int, **other: Any) -> Database:
        """Return the database of a further search of the same run, which is for something ``other``: in a file of its
        own, which is read again where the run goes on."""
        path, search = self.path.with_name(f"candidates.{number}.jsonl"), _normal({**self.search, **other})
        going_on = self.resumed and path.is_file() and _head(path) == search
        return Database(path, search, _whole(path) if going_on else None)

    def begin(self) -> None:
        """Make the file, where there is none yet of this search: from now on it can be resumed.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._made:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            aside.write_text(_line({"format": FORMAT, "search": self.search}), encoding="utf-8")
            os.replace(aside, self.path)
        except OSError as error:
            raise self._unwritten(error) from None
        self._made = True

    def _unwritten(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write {self.path}: {error.strerror}; name another --out")

    def record(self, outcomes: Iterable[tuple[Configuration, Outcome]]) -> None:
        """Add what is new of a batch.

        Raises:
            ConfigError: the file cannot be written.
        """
        new = [(config, outcome) for config, outcome in outcomes if config not in self.known]
        if not new:
            return
        lines = []
        for config, outcome in new:
            self.known[config] = outcome
            result = {"rejected": outcome} if isinstance(outcome, str) else {"score": outcome.to_data()}
            lines.append(_line({"config": asdict(config), **result}))
        self.begin()
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritten(error) from None


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


def _normal(search: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON makes of it, to compare with what was read."""
    found: dict[str, Any] = json.loads(json.dumps(search))
    return found


def _head(path: Path) -> dict[str, Any]:
    """Return what the file says it searches.

    Raises:
        ConfigError: not a file of this format.
    """
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline(1 << 20))
        if first["format"] != FORMAT:
            raise ConfigError(f"{path} has format {str(first['format'])[:20]}, this version reads {FORMAT}; name "
                              "another folder, or use the version that wrote it")  # fmt: skip
        head = first["search"]
        if not isinstance(head, dict):
            raise TypeError
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name another folder") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not a search's file: its first line does not say what was searched; "
                          "name another folder") from None  # fmt: skip
    return head


def differs(head: Mapping[str, Any], search: Mapping[str, Any]) -> str:
    """Say which parts of two searches differ."""
    wanted = _normal(search)
    names = [name for name in {**head, **wanted} if head.get(name) != wanted.get(name)]
    pairs = [f"{name} {_short(head.get(name))} there, {_short(wanted.get(name))} here" for name in names]
    return "; ".join(pairs[:3])


def _short(value: object) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _whole(path: Path) -> dict[Configuration, Outcome]:
    """Return the outcomes of a file, and take away what a kill cut short."""
    known, whole = _read(path)
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return known


def _read(path: Path) -> tuple[dict[Configuration, Outcome], int]:
    """Return the outcomes, and the bytes up to the end of the last whole line.

    Raises:
        ConfigError: a whole line that is not an outcome.
    """
    known: dict[Configuration, Outcome] = {}
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if number > 1:
                try:
                    config, outcome = _outcome(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise ConfigError(f"{path}, line {number}: not an outcome, so the file was changed; "
                                      "without that line the search goes on") from None  # fmt: skip
                known[config] = outcome
            whole += len(line)
    return known, whole


def _outcome(data: Mapping[str, Any]) -> tuple[Configuration, Outcome]:
    config = Configuration(**data["config"])
    types = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    if any(kind not in (int, str, bool) for kind in types.values()):
        raise TypeError
    return config, str(data["rejected"]) if "rejected" in data else Score.from_data(data["score"])
