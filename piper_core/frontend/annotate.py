"""Annotations: names for parts of a model's forward, kept by a capture on every node, forward and backward.

This module imports no torch until a capture is under way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar

from piper_core.errors import ConfigError
from piper_core.names import Region

PREFIX = "piper."
"""Keys of ``node.meta["custom"]`` that are ours start so; ``piper.LAYER`` and ``piper.REGION`` are built in."""
LAYER, REGION, CHILD, ROOT = "LAYER", "REGION", "CHILD", "ROOT"
_RESERVED = frozenset({REGION, CHILD, ROOT, "MB", "PASS"})
_REGIONS = frozenset(map(str, Region))
_TAG = re.compile(r"[A-Za-z_]\w{0,63}")

Call = TypeVar("Call", bound=Callable[..., Any])

_counts: dict[str, int] | None = None
_open: list[dict[str, int | str]] = []


class annotate:  # noqa: N801  # used like a function
    """Name the part of a forward that runs inside: ``with annotate("PP"): ...`` or ``annotate("PP")(self.block)(x)``.

    The name of a region (attention, mlp, router, expert, embed, head) sets ``REGION``. Any other tag is the person's
    own: each entry gets the next index, in trace order, so that directives can filter on ``PP: 1``. Annotations nest;
    the inner one of a tag wins. Outside a capture nothing happens.

    Raises:
        ConfigError: a tag that is no name, or one that the DAG gives meaning to itself.
    """

    __slots__ = ("_entered", "tag")

    def __init__(self, tag: str) -> None:
        if not _TAG.fullmatch(str(tag)) or tag in _RESERVED:
            raise ConfigError(
                f"annotate needs a name of its own such as 'PP', or a region ({', '.join(sorted(_REGIONS))}), "
                f"found {str(tag)[:60]!r}"
            )
        self.tag = tag
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        if _counts is None:
            return
        if self.tag in _REGIONS:
            scope = tagged(**{REGION: self.tag})
        else:
            index = _counts[self.tag] = _counts.get(self.tag, -1) + 1
            scope = tagged(**{self.tag: index})
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def __call__(self, function: Call) -> Call:
        """Return ``function`` (or a module) annotated: each call is one entry."""
        tag = self.tag

        @wraps(getattr(function, "forward", function))
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with annotate(tag):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]  # the same signature by construction


@contextmanager
def tagged(**tags: int | str) -> Iterator[None]:
    """Put ``tags`` on the nodes of what runs inside.

    Relies on ``torch.fx.traceback.annotate``: nodes carry its dictionary in ``meta["custom"]``, AOTAutograd copies it
    from each forward node to the nodes of its backward, and gradient accumulation carries none (torch >= 2.11).
    """
    from torch.fx.traceback import annotate as fx_annotate

    _open.append({**(_open[-1] if _open else {}), **tags})
    try:
        with fx_annotate({PREFIX + name: value for name, value in tags.items()}):
            yield
    finally:
        _open.pop()


def is_open(tag: str) -> bool:
    """Say whether the code that runs is inside an annotation of ``tag``."""
    return bool(_open) and tag in _open[-1]


@contextmanager
def recording() -> Iterator[None]:
    """Annotations count from 0 inside: one pass over a model's forward."""
    global _counts
    before, _counts = _counts, {}
    try:
        with tagged(**{ROOT: 1}):
            yield
    finally:
        _counts = before
