"""Run what a search found: the best few candidates for real where there are enough devices, else a rehearsal of the
winner.

Real candidates race: they take turns, round after round, and who is slower beyond doubt, or among the slower half, runs
no more (:mod:`profiler.race`). Where the times cannot tell, the prediction's order stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from piper_core.errors import PiperError

if TYPE_CHECKING:
    from piper_core.arch.record import Architecture
    from piper_core.program.strategy import Strategy
    from piper_core.runtime.rehearsal import Rehearsal

Device = Literal["cpu", "cuda"]
CPU = "cpu"
"""Cluster whose devices are processes of a host."""
DEFAULT = 3
"""Candidates that are run where the number is not given."""
PROCESS_BYTES, CONTEXT_BYTES = 400e6, 280e6
"""Resident memory of a rank on a host with torch in it and little else; what of that a predicted peak counts."""
WIDER = 2.0
"""Bytes that run for one that is predicted: in 32 bits instead of 16."""
REHEARSAL_S = 60.0
"""Limit for a rehearsal in a process of its own, the import of torch on a busy machine included."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate on real ranks: the median step time of each round, the largest peak of a rank's tensors, the losses
    of its first steps; or the reason why there is none. ``out`` says when and why it left the race."""

    candidate: int
    rounds_s: tuple[float, ...] = ()
    peak_bytes: int = 0
    losses: tuple[float, ...] = ()
    reason: str = ""
    out: str = ""

    @property
    def step_time_s(self) -> float:
        """Median over rounds; infinite for one that failed."""
        return median(self.rounds_s) if self.rounds_s else inf

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON, and for the header of a strategy file."""
        if self.reason:
            return {"failed": self.reason}
        return {
            "step_time_s": self.step_time_s, "rounds_s": list(self.rounds_s), "peak_tensor_bytes": self.peak_bytes,
            "losses": list(self.losses), "left_the_race": self.out or None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of it: measurements by candidate and the one that wins (``decided``: beyond doubt), or a rehearsal of
    the first candidate (``why`` no more than that), or the ``reason`` why neither. ``kept`` is the profile that the
    times were added to, ``not_kept`` why there is none."""

    measured: tuple[Measured, ...] = ()
    winner: int = 0
    decided: bool = False
    ended: str = ""
    rehearsal: Rehearsal | None = None
    why: str = ""
    reason: str = ""
    ranks: int = 0
    cores: int = 0
    kept: Path | None = None
    not_kept: str = ""

    def header(self) -> dict[str, Any]:
        """Return what the header of the winner's strategy file says of it."""
        if self.rehearsal is not None:
            return {"mode": "rehearsal", "of": self.rehearsal.of, "largest_difference": self.rehearsal.error}
        mine = next((each for each in self.measured if each.candidate == self.winner), None)
        return {"mode": "real", **mine.to_data()} if mine is not None else {"not_executed": self.reason}

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {
            "mode": "real" if self.measured else "rehearsal" if self.rehearsal else "none",
            "measured": [{"candidate": each.candidate, **each.to_data()} for each in self.measured],
            "winner": self.winner,
            "decided": self.decided,
            "ended": self.ended or None,
            "rehearsal": self.rehearsal.to_data() if self.rehearsal else None,
            "why": self.why or None,
            "reason": self.reason or None,
            "kept_in": str(self.kept) if self.kept else None,
            "not_kept": self.not_kept or None,
        }

    def lines(self, predicted_s: Sequence[float]) -> list[str]:
        """Return what to print; ``predicted_s`` are the step times of the candidates."""
        if self.rehearsal is not None:
            return [f"executed: row 1, in {self.rehearsal}", f"no step time was measured: {self.why}"]
        if not self.measured:
            return [f"not executed: {self.reason}"]
        shared = f" that share {self.cores} cores" if 0 < self.cores < self.ranks else ""
        made = [f"executed on {self.ranks} real ranks{shared}, in turns:"]
        for each in self.measured:
            wanted = predicted_s[each.candidate]
            if each.reason:
                made.append(f"  {each.candidate + 1}  failed: {each.reason}")
                continue
            low, high = min(each.rounds_s), max(each.rounds_s)
            made.append(
                f"  {each.candidate + 1}  measured {each.step_time_s:.4g} s a step ({low:.4g} to {high:.4g}, "
                f"{len(each.rounds_s)} rounds), predicted {wanted:.4g} s, measured / predicted "
                f"{each.step_time_s / wanted:.2f}, peak {each.peak_bytes / 2**20:,.1f} MiB"
                + (f"; {each.out}" if each.out else "")
            )
        return [*made, self._verdict(), *self._keeping()]

    def _verdict(self) -> str:
        ran = [each for each in self.measured if not each.reason]
        row = self.winner + 1
        if not ran:
            return "none of them ran; the prediction's winner stands"
        if self.decided:
            return f"winner by measurement, beyond doubt: row {row}, which the file is of"
        if len(ran) == 1:
            return f"only row {row} ran, which the file is of"
        if self.ended == "one left":
            return f"winner by measurement, though not beyond doubt against all: row {row}, which the file is of"
        why = "more runs would not tell them apart" if self.ended == "all left are as good" else "within noise"
        return f"{why}: of those left in the race row {row} was predicted to be the best, and the file is of it"

    def _keeping(self) -> list[str]:
        if self.kept is not None:
            return [f"kept: {self.kept} (piper-search history)"]
        return [f"not kept: {self.not_kept}"] if self.not_kept else []


def device_of(strategy: Strategy) -> Device:
    """Return the kind of device that a strategy's cluster has."""
    return "cpu" if strategy.header.cluster == CPU else "cuda"


def enough(ranks: int, device: Device, strategy: Strategy, *, named: bool = False) -> bool:
    """Say whether this machine has a device for each rank: CUDA devices; or, for a cluster of CPU processes or where
    the CPU was ``named``, as many processes as such a host is taken to carry."""
    from profiler.spec import load_cluster

    if device == "cpu":
        return ranks <= load_cluster(CPU).gpus_per_node and (named or strategy.header.cluster == CPU)
    from piper_core.runtime.devices import cuda_devices
    from profiler.fingerprint import gpus

    return ranks <= gpus() and ranks <= cuda_devices()  # the first asks no torch, which takes seconds


def how_many(strategies: Sequence[Strategy], ranks: int, free: float) -> int:
    """Return how many of the first strategies, ``DEFAULT`` at most, a host's ``free`` bytes hold side by side, each on
    ranks of its own. Cores may be shared, memory not."""
    count = 0
    for strategy in strategies[:DEFAULT]:
        tensors = max(strategy.header.predicted["peak_memory_bytes"]) - CONTEXT_BYTES
        free -= ranks * (PROCESS_BYTES + WIDER * max(0.0, tensors))
        if free < 0:
            break
        count += 1
    return count


def free_bytes() -> float:
    """Return memory that processes could take now, infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(found[0]) if found else inf


def execute(
    strategies: Sequence[Strategy], architecture: Architecture, k: int | None, *, address: str | None = None,
    timeout_s: float = 60.0, say: Callable[[str], None] = lambda text: None,
) -> Execution:  # fmt: skip
    """Run the first ``k`` strategies on real ranks where there are enough devices, else rehearse the first one. Where k
    is None it is as many as is usual, and a host's memory must do for them.

    A candidate that fails is recorded with its reason, and the others go on.
    """
    missing = [name for name in ("torch", "ray") if find_spec(name) is None]
    if "torch" in missing:
        return Execution(reason="torch is not installed")
    first = strategies[0]
    device, ranks = device_of(first), first.header.gpus or 1
    try:
        few = address is None and not enough(ranks, device, first)
        if few:
            return _rehearsed(first, architecture, f"{ranks} ranks have too few {device} devices here", say)
        if k is None and device == "cpu" and address is None:
            k = how_many(strategies, ranks, free_bytes())
            if not k or "ray" in missing:
                why = "this host has too little memory" if not k else "ray is not installed"
                return _rehearsed(first, architecture, why, say)
        if missing:
            return Execution(reason="ray is not installed")
        from search.execute_real import measure

        return measure(strategies[: k or DEFAULT], architecture, device, ranks, address, timeout_s, say)
    except PiperError as error:
        return Execution(reason=str(error))
    except KeyboardInterrupt:  # what the search found stands
        return Execution(reason="interrupted")


def _rehearsed(
    strategy: Strategy, architecture: Architecture, why: str, say: Callable[[str], None]
) -> Execution:  # fmt: skip
    """Rehearse in a process of its own, which takes torch with it when it ends."""
    from piper_core.frontend.apart import apart

    say("rehearsing the winner")
    return Execution(rehearsal=apart(_rehearse, strategy, architecture, timeout_s=REHEARSAL_S), why=why)


def _rehearse(strategy: Strategy, architecture: Architecture) -> Rehearsal:
    from piper_core.runtime.rehearsal import rehearse

    return rehearse(strategy, architecture)
