"""Names in the header of a strategy file that the language itself does not know: clusters and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from piper_core.errors import ConfigError
from piper_core.program.strategy import Header
from profiler.spec import Cluster, load_cluster

NOT_FAMILIES = ("custom", "list")
"""What else a header's ``schedule`` may say: an order by hand, or by the list scheduler."""


def check_header(header: Header) -> Cluster | None:
    """Return the cluster that a header names, None where it names none.

    Raises:
        ConfigError: an unknown cluster, a schedule that is no family, or a prediction that none makes.
    """
    from piper_core.schedule.families import get_family

    _check_predicted(header.predicted)
    if header.schedule is not None and header.schedule not in NOT_FAMILIES:
        try:
            get_family(header.schedule)
        except ConfigError as error:
            raise ConfigError(f"header field schedule: {error}; or custom, for an order by hand") from None
    try:
        return load_cluster(header.cluster) if header.cluster is not None else None
    except ConfigError as error:
        raise ConfigError(f"header field cluster: {error}") from None


def _check_predicted(predicted: Mapping[str, Any]) -> None:
    """Refuse a step time or a memory that is not above 0: what changed since is told against it.

    Raises:
        ConfigError: with the field.
    """
    peaks = predicted.get("peak_memory_bytes")
    numbers = [("step_time_s", predicted.get("step_time_s"))]
    numbers += [("peak_memory_bytes", peak) for peak in (peaks if isinstance(peaks, Sequence) else [peaks])]
    for name, value in numbers:
        if isinstance(value, (int, float)) and not 0 < value < inf:
            raise ConfigError(f"header field predicted: {name} must be above 0, found {value}; "
                              "leave it out, and predict the file to have it anew")  # fmt: skip
