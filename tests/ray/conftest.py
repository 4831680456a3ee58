"""One Ray cluster for the tests that take a trainer: starting one takes seconds, and each actor imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from piper_core.runtime.ray_session import RaySession
from tests.ray.strategies import RANKS


@pytest.fixture(scope="session")
def cluster() -> Iterator[RaySession]:
    """A cluster of this machine's own; trainers find it and leave it running."""
    session = RaySession(None, RANKS)
    yield session
    session.close()
