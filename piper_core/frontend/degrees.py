"""Which tensor parallel degrees can be traced, known without torch."""

from __future__ import annotations

from piper_core.arch.contract import check_degree
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import ShardKind

DEGREES = range(1, 9)
"""A tensor group is at most a node of eight."""


def check_tensor(architecture: Architecture, degree: int, seq_len: int, *, sequence: bool = False) -> None:
    """Reject a degree that is not 1 to 8 or does not divide heads, key heads, widths, vocabulary (and the sequence).

    Raises:
        ConfigError: with the degrees that would do.
    """
    if degree not in DEGREES:
        raise ConfigError(f"tensor parallel degree must be {DEGREES[0]} to {DEGREES[-1]}, found {degree}")
    check_degree(architecture, ShardKind.SEQUENCE if sequence else ShardKind.TENSOR, degree, seq_len)
