"""Entries of a JSON record, read one by one: each is what it should be and within its range, or is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from piper_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that a field may have, both ends among them: ``whole`` ones alone where they count something."""

    least: float
    most: float
    whole: bool = True

    def holds(self, value: object) -> bool:
        """Say whether a JSON value is such a number; NaN and infinities are not, nor is true."""
        if isinstance(value, bool) or not isinstance(value, int | float) or (self.whole and isinstance(value, float)):
            return False
        return self.least <= value <= self.most

    def __str__(self) -> str:
        if self.whole:
            return f"an integer from {self.least} to {self.most}"
        return f"a number from {self.least:.9g} to {self.most:.9g}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A JSON object and how it is called; every reader raises ConfigError with the name of what is missing or wrong."""

    data: Mapping[str, object]
    name: str

    @staticmethod
    def of(value: object, name: str) -> Entry:
        """Return a value as an entry: an object, or refused."""
        if not isinstance(value, Mapping):
            _refuse(name, "an object", value)
        return Entry(value, name)

    def at(self, field: str) -> str:
        """Return how a field is called."""
        return f"{self.name}{'' if self.name.endswith(': ') else '.'}{field}"

    def get(self, field: str) -> object:
        """Return a field, whatever it is."""
        if field not in self.data:
            raise ConfigError(f"{self.at(field)} is missing; take it again")
        return self.data[field]

    def only(self, fields: Collection[str]) -> None:
        """Refuse what has other fields than these; :meth:`get` refuses what lacks one."""
        for field in self.data:
            if field not in fields:
                raise ConfigError(f"{self.at(field[:40])} is no field of it; take it again")

    def text(self, field: str, known: Collection[str] | None = None) -> str:
        """Return a text, one of ``known`` where that is given, else one printable line."""
        value = self.get(field)
        if not isinstance(value, str) or (value not in known if known is not None else not value.isprintable()):
            _refuse(self.at(field), "printable text" if known is None else " or ".join(known), value)
        return value

    def flag(self, field: str) -> bool:
        """Return true or false."""
        value = self.get(field)
        if not isinstance(value, bool):
            _refuse(self.at(field), "true or false", value)
        return value

    def whole(self, field: str, within: Range) -> int:
        """Return an integer."""
        value = self.get(field)
        if not isinstance(value, int) or not within.holds(value):
            _refuse(self.at(field), str(within), value)
        return value

    def number(self, field: str, within: Range) -> float:
        """Return a number."""
        return _number(self.at(field), self.get(field), within)

    def numbers(self, field: str, within: Range) -> tuple[float, ...]:
        """Return a list of numbers, one at least."""
        values = self.get(field)
        if not isinstance(values, list) or not values:
            _refuse(self.at(field), "a list of numbers, one at least", values)
        return tuple(_number(f"{self.at(field)}[{i}]", value, within) for i, value in enumerate(values))

    def inner(self, field: str) -> Entry:
        """Return an object in this one."""
        return Entry.of(self.get(field), self.at(field))

    def each(self, field: str) -> Iterator[Entry]:
        """Yield the objects of a list."""
        values = self.get(field)
        if not isinstance(values, list):
            _refuse(self.at(field), "a list", values)
        for i, value in enumerate(values):
            yield Entry.of(value, f"{self.at(field)}[{i}]")


def _number(name: str, value: object, within: Range) -> float:
    if not isinstance(value, int | float) or not within.holds(value):
        _refuse(name, str(within), value)
    return float(value)


def _refuse(name: str, expected: str, found: object) -> NoReturn:
    raise ConfigError(f"{name} must be {expected}, found {str(found)[:40]!r}; take it again")
