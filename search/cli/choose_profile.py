"""Which profile a command prices with: the one that was named, the store's own, one taken now, or none."""

from __future__ import annotations

import sys
from pathlib import Path

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from profiler import console
from profiler.record import Profile
from profiler.spec import Cluster
from search.pricing import Pricing
from search.profiled import check_device, local_profile, threads_of
from search.space import divisors

NONE, AUTO = "none", "auto"
AUTO_BUDGET_S = 60.0


MOST_RANKS = 2
"""Ranks among which transfers must have been measured; those of more are fitted."""
MOST_SEQUENCES = 16
"""Largest microbatch that is measured; larger ones are fitted."""


def choose_profile(
    named: str | None, architecture: Architecture, cluster: Cluster, ranks: int, batch: tuple[int, int], *, hidden: bool
) -> Pricing | None:
    """Return what to price with, None for presets: what was ``named`` (a file, ``none``, or ``auto``: the store's own,
    and where it has none, or not of this, one that is taken now), else the store's own. ``batch`` is (sequences, tokens
    in each).

    Raises:
        ConfigError: no such file, a profile of another model or device, or nothing here to measure on.
    """
    from profiler.store import check_model, model_digest

    if named == NONE:
        return None
    path = local_profile(architecture, cluster, ranks) if named in (None, AUTO) else Path(str(named))
    found = None if path is None else Pricing.of(path)
    if named == AUTO and (found is None or _lacks(found.profile, ranks, batch[1])):
        path = _take(architecture, cluster, ranks, batch, hidden=hidden)
        found = Pricing.of(path)
    if found is None:
        return None
    check_model(found.profile, architecture.name, model_digest(architecture), f"--profile {found.path}")
    check_device(found.profile, cluster, f"--profile {found.path}")
    return found


def _lacks(profile: Profile, ranks: int, seq_len: int) -> bool:
    """Say whether a profile was taken for another search: of sequences of another length, or of fewer ranks."""
    lengths = {site.seq_len for site in profile.sites}
    most = max((each.ranks for each in profile.transfers), default=1)
    return seq_len not in lengths or most < min(ranks, MOST_RANKS)


def _take(
    architecture: Architecture, cluster: Cluster, ranks: int, batch: tuple[int, int], *, hidden: bool
) -> Path:  # fmt: skip
    """Measure the model on this machine."""
    if cluster.name != "cpu":
        raise ConfigError(
            f"--profile auto measures this machine's CPU, not {cluster.name}; take a profile there with piper-profile, "
            "and name its file"
        )
    if not hidden:
        print(f"measuring {architecture.name} for {AUTO_BUDGET_S:.0f} s at most, once", file=sys.stderr)
    from profiler.take import measured

    sequences, seq_len = batch
    sizes = [b for b in divisors(sequences) if b <= MOST_SEQUENCES]
    few = tuple(sorted({1, sizes[len(sizes) // 2], sizes[-1]}))
    return measured(
        architecture, "cpu", seq_len=seq_len, ranks=ranks, micro_batch=few,
        threads=threads_of(ranks), budget_s=AUTO_BUDGET_S, hidden=hidden or console.plain(sys.stderr),
    )  # fmt: skip
