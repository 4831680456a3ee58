"""The seam between search and costs: seconds of compute, communication and update."""

from __future__ import annotations

from typing import Protocol

from piper_core.arch.chunk import Chunk
from piper_core.names import Collective, Phase, Recompute
from search.cost.software import Software

OVERLAP_SLOWDOWN = 1.126
"""Factor by which compute and communication that run at the same time slow each other (Hetu-Galvatron's
profiled coefficient on A100)."""


class CostModel(Protocol):
    """What search, simulator and bounds ask of a cost model; every answer is in seconds, deterministic, and
    about a microsecond when asked again.

    Sizes: ``bytes`` of a collective is the full size of the tensor on one rank, before a scatter or after a
    gather: an all_reduce of b bytes, an all_gather into b bytes, a reduce_scatter from b bytes, an
    all_to_all that sends b bytes (a part to each member, its own included), a ring_exchange after which
    each member has seen b bytes.
    """

    @property
    def software(self) -> Software:
        """What the training program does."""
        ...

    @property
    def overlap_slowdown(self) -> float:
        """Factor on both sides while compute and communication overlap."""
        ...

    @property
    def host_s(self) -> float:
        """Seconds that starting and finishing one message take of the thread that computes."""
        ...

    @property
    def meeting_s(self) -> float:
        """Seconds that ranks lose at a collective outside chunks beside its own time, since they come to it apart."""
        ...

    @property
    def regular(self) -> bool:
        """Whether no sequence takes longer in a larger microbatch, as closed forms have it and measurements need
        not."""
        ...

    def compute_s(
        self,
        chunk: Chunk,
        phase: Phase,
        sequences: float,
        tensor: int = 1,
        sequence_parallel: bool = False,
        context: int = 1,
        expert: int = 1,
        recompute: Recompute = Recompute.FULL,
    ) -> float:
        """Return the time of one phase on one rank, without its collectives; B is BI plus BW.

        ``sequences`` is the microbatch size; ``recompute`` says what R repeats: all of F, or the chunk's
        ``core``.
        """
        ...

    def collective_s(self, kind: Collective, bytes: float, ranks: tuple[int, ...]) -> float:
        """Return the time of a collective of ``bytes`` (see the class) over ``ranks``."""
        ...

    def send_s(self, bytes: float, sources: tuple[int, ...], destinations: tuple[int, ...]) -> float:
        """Return the time in which every source sends ``bytes`` to the destination at its position."""
        ...

    def update_s(self, parameters: float) -> float:
        """Return the time of the optimiser step over the parameters that one rank owns."""
        ...
