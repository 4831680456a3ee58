"""One rank's process: it builds its part of the model, meets the others, and runs steps when it is told to.

Ray places it, starts it and calls these methods; nothing of a step goes through Ray but the call and the answer. What
goes wrong comes back as a record (:class:`piper_core.runtime.faults.Broke`), never as an exception, so that the caller
can tell a cause from its echoes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from piper_core.runtime.faults import Broke, Fault, broke
from piper_core.runtime.interface import interface_of

if TYPE_CHECKING:
    from torch import Tensor

    from piper_core.frontend.run import Compiler
    from piper_core.ir.timeline import Lane
    from piper_core.runtime.model import ModelSource
    from piper_core.runtime.program import Training
    from piper_core.runtime.state import Held, Which
    from piper_core.schedule.compile import Compiled

Result = TypeVar("Result")
Device = Literal["cpu", "cuda"]
How = Literal["run", "time", "memory"]
"""How a step is run: plainly, with the times of its actions, or with the memory that they take."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told."""

    compiled: Compiled
    source: ModelSource
    training: Training
    device: Device = "cpu"
    timeout_s: float = 60.0
    memory_limit_bytes: float | None = None
    fault: Fault | None = None
    compiler: Compiler = "none"


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of one rank: its part of the loss, how long the step took it, and what was measured. Times are of one
    clock for all ranks: a machine's own, or where there are several the time since they met, within a message's
    latency."""

    rank: int
    loss: float
    norm: float
    seconds: float
    began_s: float
    lanes: tuple[Lane, ...] = ()
    peak_bytes: int = 0
    kept_bytes: int = 0
    peak_by_action: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank runs."""

    pid: int
    node: str
    address: str
    devices: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of its machine's a rank is, and how many those are."""

    place: int
    ranks: int


class Worker:
    """One rank. ``where`` may be called while another method runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._at: Callable[[], str] = lambda: "its start"
        self._program: Any = None
        self._communicator: Any = None
        self._store: Any = None
        self._job: Job | None = None
        self._seat = Seat(0, 1)
        self._address, self._met_s = "", 0.0

    def where(self) -> str:
        """Say at what it is."""
        return self._at()

    def home(self) -> Home:
        """Say where it runs."""
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        self._address = str(get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray's
        return Home(os.getpid(), context.get_node_id(), self._address, len(gpus))

    def ready(self) -> None:
        """Import what building needs."""
        import piper_core.runtime.gloo
        import piper_core.runtime.program  # noqa: F401

    def listen(self, host: str, ranks: int, timeout_s: float) -> int:
        """Serve as the place where ranks meet; return the port."""
        from torch._C._distributed_c10d import TCPStore  # torch.distributed does not say that it exports it

        self._store = TCPStore(
            host, 0, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return int(self._store.port)

    def build(self, job: Job, seats: dict[int, Seat]) -> Broke | None:
        """Make the tables of its row from the graphs that came with the job; needs no other rank. ``seats`` says of
        each rank which of its machine's it is."""
        return self._tried(lambda: self._build(job, seats[self.rank]))

    def _build(self, job: Job, seat: Seat) -> None:
        import torch

        from piper_core.frontend.heap import keep_heap
        from piper_core.runtime.lowering import Lowering

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // seat.ranks))
        if job.device == "cpu":
            keep_heap()
        if job.compiler == "inductor":
            from torch._inductor import config

            config.compile_threads = 1  # ranks already share the cores, and helpers would outlive a rank that is killed
        self._job, self._seat = job, seat
        self._at = lambda: "making graphs"
        self._lowering = Lowering(job.compiled, job.source, compiler=job.compiler)
        self._lowering.table(self._lowering.row_of(self.rank))

    def meet(self, host: str, port: int, ranks: int, progress: Path, *, loopback: bool) -> list[str] | Broke:
        """Join the others and build its part of the model; return the steps by which ``progress`` says where it is,
        none where that file is on another machine."""
        return self._tried(lambda: self._meet(host, port, ranks, progress, loopback))

    def _meet(self, host: str, port: int, ranks: int, progress: Path, loopback: bool) -> list[str]:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from piper_core.runtime.cores import bind
        from piper_core.runtime.program import RankProgram
        from piper_core.runtime.progress import follow

        job = self._job
        assert job is not None, "build comes first"
        self._at = lambda: "meeting the others"
        interface = "lo" if loopback else interface_of(self._address)
        if interface:  # a host's own name need not lead anywhere, or not to where the others are
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        wait = timedelta(seconds=job.timeout_s)
        store = self._store or TCPStore(host, port, ranks, is_master=False, timeout=wait)
        if job.device == "cuda":
            from piper_core.runtime.nccl import NcclCommunicator

            torch.cuda.set_device(0)  # Ray shows each rank its own
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=self.rank, world_size=ranks, timeout=wait)
            self._communicator = NcclCommunicator(job.timeout_s)
        else:
            from piper_core.runtime.gloo import GlooCommunicator

            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=ranks, timeout=wait)
            self._communicator = GlooCommunicator(job.timeout_s)
        self._program = RankProgram(self._lowering, self.rank, self._communicator, job.training)
        if job.fault is not None and job.fault.rank == self.rank:
            job.fault.install(self._program)
        dist.barrier()
        dist.barrier()  # the first also connects
        if job.device == "cpu":
            bind(self._seat.place, self._seat.ranks)
        self._met_s = 0.0 if loopback else perf_counter()
        program = self._program
        if not follow(program, progress, self.rank):
            return []
        return [program.where_is(at) for at in range(len(program.code))]

    def step(self, batch: Sequence[Tensor], how: How) -> Stepped | Broke:
        """Run one step on the global batch, of which it takes its slices."""
        return self._tried(lambda: self._step(batch, how))

    def _step(self, batch: Sequence[Tensor], how: How) -> Stepped:
        from piper_core.runtime.measure import peaks, record

        program, job = self._program, self._job
        assert job is not None, "a worker is built before it steps"
        self._at = program.where
        device = program.device
        slices = program.slices(*(each.to(device) for each in batch))
        began = perf_counter()
        if how == "memory" or job.memory_limit_bytes is not None:
            limit = float("inf") if job.memory_limit_bytes is None else job.memory_limit_bytes
            peak = peaks(program, slices, limit)
            loss = float(peak.loss)
            took = perf_counter() - began
            return Stepped(
                self.rank, loss, program.sync.norm, took, began - self._met_s, (), peak.peak_bytes, peak.kept_bytes,
                dict(peak.by_action),
            )  # fmt: skip
        if how == "time":
            from piper_core.ir.timeline import Timeline

            recorded = record(program, slices)
            loss = float(recorded.loss)
            took, lanes = perf_counter() - began, Timeline(recorded.lanes).shifted(-self._met_s).lanes
            return Stepped(self.rank, loss, program.sync.norm, took, began - self._met_s, lanes)
        loss = float(program.run(slices))
        return Stepped(self.rank, loss, program.sync.norm, perf_counter() - began, began - self._met_s)

    def held(self, which: Which) -> list[Held] | Broke:
        """Return what it holds of each parameter."""
        from piper_core.runtime.state import held

        return self._tried(lambda: list(held(self._program, which)))

    def save(self, folder: Path) -> Broke | None:
        """Write its part of a checkpoint; all ranks do."""
        from piper_core.runtime.checkpoint import write

        self._at = lambda: "saving"
        return self._tried(lambda: write(self._program, folder))

    def load(self, folder: Path) -> Broke | None:
        """Read its part of a checkpoint; all ranks do."""
        from piper_core.runtime.checkpoint import read

        self._at = lambda: "loading"
        return self._tried(lambda: read(self._program, folder))

    def close(self) -> None:
        """Leave the others."""
        import torch.distributed as dist

        if self._communicator is not None:
            self._communicator.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tried(self, what: Callable[[], Result]) -> Result | Broke:
        try:
            return what()
        except Exception as error:
            return broke(self.rank, self._at(), error)
