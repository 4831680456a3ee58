"""The seam between the engine and what proposes configurations."""

from __future__ import annotations

from math import inf
from typing import Protocol

from search.candidate import Score
from search.space import Configuration


class Generator(Protocol):
    """Proposes configurations in batches and hears how they did.

    Batches do not depend on how many workers evaluate them, so the same seed gives the same search.
    """

    name: str
    pruned: dict[str, int]
    """Configurations that were never built, by reason."""
    expired: bool
    """Whether the last call of :meth:`ask` stopped at its deadline: there may be more than it returned."""

    def ask(self, n: int, threshold_s: float = inf, deadline_s: float = inf) -> list[Configuration]:
        """Return up to ``n`` configurations that may take ``threshold_s`` or less; none when there are no more, or when
        the clock (``time.perf_counter``) passes ``deadline_s`` first."""
        ...

    def tell(self, config: Configuration, score: Score | None) -> None:
        """Hear the score of a configuration that was asked for, None where it cannot run."""
        ...

    def bound(self) -> float:
        """Return a step time that no configuration left can beat (infinity when none is left)."""
        ...
