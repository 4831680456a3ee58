"""What the tests of bad input share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piper_core.errors import PiperError


def stopped_at_most(action: Callable[..., object], *values: Any) -> None:
    """Do what bad input may stop: with an error of ours, of one line, or not at all."""
    try:
        action(*values)
    except PiperError as error:
        line = str(error)
    else:
        return
    assert line
    assert "\n" not in line
    assert len(line) < 2000
