"""What an exporter is: a strategy in, the files of another system out, with what that system cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from search.export.job import Job


@dataclass(frozen=True, slots=True)
class Export:
    """Files to write, by name, and what a person must know about them.

    ``lost`` says, a line each, what of the strategy the target cannot express and what happens instead; ``notes`` how
    to use the files.
    """

    files: Mapping[str, str]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Exporter(Protocol):
    """One target. It has no state; one module each, named in ``search.export.EXPORTERS``."""

    def __call__(self, job: Job) -> Export:
        """Return the files.

        Raises:
            ConfigError: the target has nothing that comes near; the text says why.
        """
        ...
