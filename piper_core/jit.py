"""Loops in the subset of Python that numba compiles, compiled once that is worth the wait."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PATIENCE, COLD = 600_000, 6_000_000
"""Turns that a process runs uncompiled, half a second and five, before it imports numba, which takes half a second, and
loads the loops, or compiles them once for all runs, which takes three more."""


class Loops:
    """Functions of one module: as they are, on lists, until they have run for long enough, or where there is no numba;
    then compiled, on arrays. The numbers are the same to the bit."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.functions = {function.__name__: function for function in functions}
        self.compiled = False
        self._turns = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["functions"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def pick(self, turns: int) -> Loops:
        """Return these loops, compiled if another so many turns make that worth it."""
        self._turns += turns
        late = self._turns > PATIENCE and (self._turns > COLD or self._on_disk())
        if not self.compiled and late and find_spec("numba"):
            try:
                self._compile(cache=True)
            except RuntimeError:  # no folder that numba may keep them in: this process compiles them for itself
                self._compile(cache=False)
        return self

    def load(self) -> None:
        """Load the loops at once where they were compiled before."""
        if not self.compiled and self._on_disk() and find_spec("numba"):
            self._compile(cache=True)

    def _compile(self, *, cache: bool) -> None:
        from numba import njit

        make = njit(cache=cache)
        self.functions = {name: make(function) for name, function in self.functions.items()}
        self.compiled = True

    def _on_disk(self) -> bool:
        """Return whether numba has compiled the loops before (where it may write beside their file)."""
        name, function = next(reversed(self.functions.items()))
        path = Path(function.__code__.co_filename)
        return any(path.parent.glob(f"__pycache__/{path.stem}.{name}-*.nbi"))
