"""Names in the header of a strategy file that the language itself does not know: clusters and schedules."""

from __future__ import annotations

from piper_core.errors import ConfigError
from piper_core.program.strategy import Header
from profiler.spec import Cluster, load_cluster

NOT_FAMILIES = ("custom", "list")
"""What else a header's ``schedule`` may say: an order by hand, or by the list scheduler."""


def check_header(header: Header) -> Cluster | None:
    """Return the cluster that a header names, None where it names none.

    Raises:
        ConfigError: an unknown cluster, or a schedule that is no family.
    """
    from piper_core.schedule.families import get_family

    if header.schedule is not None and header.schedule not in NOT_FAMILIES:
        try:
            get_family(header.schedule)
        except ConfigError as error:
            raise ConfigError(f"header field schedule: {error}; or custom, for an order by hand") from None
    try:
        return load_cluster(header.cluster) if header.cluster is not None else None
    except ConfigError as error:
        raise ConfigError(f"header field cluster: {error}") from None
