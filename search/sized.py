"""A cache that holds so much, whatever the number of its answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sized
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R", bound=Sized)


class SizedCache(Generic[P, R]):
    """Answers of a function of hashable arguments, the last used of them that together are no longer than ``most``."""

    def __init__(self, function: Callable[P, R], most: int) -> None:
        self.function, self.most, self.size = function, most, 0
        self._known: OrderedDict[Hashable, R] = OrderedDict()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, *sorted(kwargs.items()))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        made = self.function(*args, **kwargs)
        self._known[key] = made
        self.size += len(made)
        while self.size > self.most and len(self._known) > 1:
            self.size -= len(self._known.popitem(last=False)[1])
        return made

    def __len__(self) -> int:
        return len(self._known)

    def cache_clear(self) -> None:
        """Forget all answers."""
        self._known.clear()
        self.size = 0


def sized_cache(most: int) -> Callable[[Callable[P, R]], SizedCache[P, R]]:
    """Return a decorator that keeps answers of a function up to a total length."""

    def decorate(function: Callable[P, R]) -> SizedCache[P, R]:
        return SizedCache(function, most)

    return decorate
