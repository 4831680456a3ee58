"""Garbage collection put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put garbage collection off to the end: what a search keeps is much, has no cycles, and would be gone through
    again and again while it grows (a sixth to a third of the time of bounding). It is old at once then, so that whoever
    comes next does not go through all of it either."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what others froze stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, whatever it was in
        gc.enable()
