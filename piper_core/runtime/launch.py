"""All ranks of a run as Ray actors: placed, started, called together, watched, and ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from piper_core.errors import ConfigError, RunError
from piper_core.runtime.actor import Device, Home, Job, Seat, Worker
from piper_core.runtime.faults import Broke, Seen, broke, cause
from piper_core.runtime.progress import make_progress, read_progress
from piper_core.runtime.ray_session import RaySession, end

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from piper_core.frontend.cut import Cut

START_S = 180.0
"""Limit for starting processes, importing torch and making graphs."""
COMPILE_S = 1200.0
"""The same where Inductor compiles them."""
_TICK_S, _LOOK_S, _GRACE_S, _PLACE_S = 0.5, 2.0, 2.0, 60.0


class Gang:
    """The ranks of one run.

    Every call ends: with all answers, or with a :class:`RunError` that names a rank, its action and the cause. After
    an error nothing of it is left, and it takes no more calls.
    """

    def __init__(
        self, job: Job, ranks: Sequence[int], *, address: str | None = None, start_s: float = START_S
    ) -> None:  # fmt: skip
        """Start one actor for each rank, on ``address`` or on this machine.

        The model is captured here, once, while Ray starts and the actors import torch; ranks read the graphs.

        Raises:
            ConfigError: no such cluster, or one without enough devices; RunError: a rank could not be built.
        """
        self.ranks, self.timeout_s, self._closed = tuple(ranks), job.timeout_s, False
        self.homes: dict[int, Home] = {}
        self._actors: dict[int, ActorHandle[Worker]] = {}
        self._group: Any = None
        pool = ThreadPoolExecutor(1, "capture")
        captured = pool.submit(lambda: job.source.cut)
        pool.shutdown(wait=False)
        self.session = RaySession(address, len(ranks))
        self._progress = self.session.folder / "progress"
        self._steps: dict[int, Sequence[str]] = {}
        self._looked = time.monotonic()
        try:
            make_progress(self._progress, len(ranks))
            self._place(job.device)
            self.homes = dict(zip(self.ranks, self.call("home", timeout_s=start_s), strict=True))
            self._build(job, captured, start_s)
        except BaseException:
            self.close()
            raise

    def _place(self, device: Device) -> None:
        """Reserve a place for each rank, and start the actors; ranks fill nodes in order."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind, need = ("GPU", "CUDA devices") if device == "cuda" else ("CPU", "CPUs")
        have = int(ray.cluster_resources().get(kind, 0))  # type: ignore[no-untyped-call]  # Ray's
        if have < len(self.ranks):
            raise ConfigError(
                f"the strategy needs {len(self.ranks)} {need}, Ray has {have}; use --ranks virtual to rehearse it, or "
                "--address of a larger cluster"
            )
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        self._group = placement_group([bundle] * len(self.ranks), strategy="PACK")
        if not self._group.wait(_PLACE_S):
            raise ConfigError(f"Ray has {have} {need}, but {len(self.ranks)} were not free within {_PLACE_S:.0f} s")
        node_of: Mapping[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        order = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
        made: Any = ray.remote  # Ray's stubs know no concurrency groups
        remote = made(max_restarts=0, concurrency_groups={"control": 1})(Worker)
        for rank, place in zip(self.ranks, order, strict=True):
            self._actors[rank] = remote.options(
                num_cpus=1, num_gpus=1 if device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
            ).remote(rank)  # fmt: skip

    def _build(self, job: Job, captured: Future[Cut], start_s: float) -> None:
        import ray

        for actor in self._actors.values():
            actor.ready.remote()  # nobody waits for it: what goes wrong does so again in ``build``
        captured.result()
        homes = list(self.homes.values())
        local = len({home.node for home in homes}) == 1
        host = "127.0.0.1" if local else homes[0].address
        first = self.ranks[0]
        port = self._collect({first: self._actors[first].listen.remote(host, len(self.ranks), start_s)}, start_s)[first]
        on_node: dict[str, list[int]] = {}
        for rank, home in self.homes.items():
            on_node.setdefault(home.node, []).append(rank)
        seats = {rank: Seat(at, len(ranks)) for ranks in on_node.values() for at, rank in enumerate(ranks)}
        self.call("build", ray.put(job), seats, timeout_s=start_s)
        steps = self.call("meet", host, port, len(self.ranks), self._progress, timeout_s=start_s, loopback=local)
        self._steps = dict(zip(self.ranks, steps, strict=True))

    # --- calls ---

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None, **named: Any) -> list[Any]:
        """Call a method of all ranks; return their answers in the order of ranks.

        Raises:
            RunError: a rank failed, died, or did not answer in time; or Ray's head is gone.
        """
        assert not self._closed, "a gang that has ended takes no calls"
        try:
            self._check_head()
            refs = {rank: getattr(actor, method).remote(*arguments, **named) for rank, actor in self._actors.items()}
            found = self._collect(refs, timeout_s or self.timeout_s)
        except BaseException:
            self.close(gently=False)
            raise
        return [found[rank] for rank in self.ranks]

    def _collect(self, refs: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        """Wait for answers, watching."""
        import ray

        began, waiting = time.monotonic(), dict(refs)
        found: dict[int, Any] = {}
        watch = _Watch(self._actors)
        while waiting:
            left = began + timeout_s - time.monotonic()
            ready, _ = ray.wait([*waiting.values()], num_returns=len(waiting), timeout=max(0.0, min(_TICK_S, left)))
            for rank in [rank for rank, ref in waiting.items() if ref in ready]:
                answer = _got(rank, waiting.pop(rank))
                found[rank] = answer
                if isinstance(answer, _Gone):
                    watch.dead[rank] = answer.why
            broken = [each for each in found.values() if isinstance(each, Broke)]
            late = waiting and time.monotonic() - began >= timeout_s
            if watch.dead or broken or late:
                if not self.session.alive():
                    break
                raise self._blame(watch, found, waiting, timeout_s)
            if waiting:
                watch.ask(waiting)
                if not self.session.alive():
                    break
        else:
            return found
        raise self._headless(watch.at | self._last())

    def _check_head(self) -> None:
        """Look for the head from time to time: actors answer without it, until Ray ends this process a minute later."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            if not self.session.alive():
                raise self._headless(self._last())

    def _headless(self, at: Mapping[int, str]) -> RunError:
        where = ", ".join(f"rank {rank} at {step}" for rank, step in sorted(at.items())[:4])
        return RunError(f"Ray's head at {self.session.address} is gone; the run has ended", also=where)

    def _blame(self, watch: _Watch, found: dict[int, Any], waiting: dict[int, Any], timeout_s: float) -> RunError:
        """Give the others a moment to say what they know, and name the cause."""
        import ray

        watch.ask(waiting)
        until = time.monotonic() + _GRACE_S
        while waiting and time.monotonic() < until:
            ready, _ = ray.wait([*waiting.values()], num_returns=1, timeout=0.1)
            for rank in [rank for rank, ref in waiting.items() if ref in ready]:
                found[rank] = _got(rank, waiting.pop(rank))
                if isinstance(found[rank], _Gone):
                    watch.dead[rank] = found[rank].why
            watch.look()
        broken = [each for each in found.values() if isinstance(each, Broke)]
        return cause(Seen(broken, watch.dead, watch.at | self._last(), watch.silent(waiting), timeout_s))

    def _last(self) -> dict[int, str]:
        """Return the action that each rank of this machine was at last, if it has begun a step."""
        cells = read_progress(self._progress)
        found = zip(self._steps.items(), cells, strict=False)
        return {rank: steps[at] for (rank, steps), at in found if steps and at >= 0}

    def close(self, *, gently: bool = True) -> None:
        """End every process of the run, ``gently`` with a moment to leave the others; again: nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end(gently)
        finally:
            self.session.close()

    def _end(self, gently: bool) -> None:
        import ray

        alive = self.session.alive()
        if alive:
            with suppress(Exception):  # whatever does not end by itself is killed below
                if gently:
                    ray.wait([each.close.remote() for each in self._actors.values()], num_returns=len(self._actors),
                             timeout=_GRACE_S)  # fmt: skip
            with suppress(Exception):
                for actor in self._actors.values():
                    ray.kill(actor)
                if self._group is not None:
                    ray.util.remove_placement_group(self._group)
        here = [home for home in self.homes.values() if self.session.own or _is_here(home, alive)]
        end([home.pid for home in here])
        self._actors.clear()


class _Gone:
    """The answer of a process that is no more."""

    def __init__(self, why: str) -> None:
        self.why = why


def _got(rank: int, ref: Any) -> Any:
    """Return an answer that is there, or the record of what became of the call."""
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError as error:
        return _Gone(_why(str(error)))
    except ray.exceptions.RayTaskError as error:
        return broke(rank, "a call", error.cause)


def _why(text: str) -> str:
    """Return in few words why a process died, as far as Ray knows."""
    if "running low on memory" in text:
        return "its process was killed, since the machine ran out of memory"
    return "its process died: something killed it, or it crashed"


def _is_here(home: Home, alive: bool) -> bool:
    """Say whether a rank ran on this machine."""
    import ray

    return alive and home.node == ray.get_runtime_context().get_node_id()


class _Watch:
    """Asks ranks where they are, while they are at it."""

    def __init__(self, actors: Mapping[int, ActorHandle[Worker]]) -> None:
        self._actors, self._asked = actors, dict[int, Any]()
        self.at: dict[int, str] = {}
        self.dead: dict[int, str] = {}

    def ask(self, ranks: Mapping[int, Any]) -> None:
        """Take what has been answered, and ask again those of whom nothing is due."""
        self.look()
        for rank in ranks:
            if rank not in self._asked:
                where: Any = self._actors[rank].where
                self._asked[rank] = where.options(concurrency_group="control").remote()

    def look(self) -> None:
        """Take what has been answered."""
        import ray

        if not self._asked:
            return
        ready, _ = ray.wait([*self._asked.values()], num_returns=len(self._asked), timeout=0)
        for rank in [rank for rank, ref in self._asked.items() if ref in ready]:
            answer = _got(rank, self._asked.pop(rank))
            if isinstance(answer, _Gone):
                self.dead[rank] = answer.why
            elif isinstance(answer, str):
                self.at[rank] = answer

    def silent(self, waiting: Mapping[int, Any]) -> list[int]:
        """Return the ranks that have not said where they are, a while after they were asked."""
        return sorted(rank for rank in waiting if rank in self._asked and rank not in self.dead)
