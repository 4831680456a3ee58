"""Score configurations on the cores of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.schedule.grid import Grid
from profiler.spec import Cluster
from search.candidate import Outcome
from search.cost.base import CostModel
from search.problem import Problem
from search.space import Configuration
from search.workers import Outcomes, Run, in_order, known_order, score

PACKAGE = "piper-search"

Recipe = tuple[Architecture, Cluster, int, int, int, ModelChunks, CostModel]
"""What a problem is made from."""

_problem: tuple[Recipe, Problem] | None = None
"""The last problem of a worker, which Ray keeps from one configuration to the next."""


def recipe_of(problem: Problem) -> Recipe:
    """Return what others need to make the same problem."""
    return (
        problem.architecture, problem.cluster, problem.gpus, problem.global_batch, problem.seq_len, problem.model,
        problem.cost,
    )  # fmt: skip


def evaluate(recipe: Recipe, config: Configuration, proved: bool, grid: Grid | None) -> tuple[Outcome, Grid | None]:
    """Score in a worker; return the order of the list scheduler too, which nobody else need find again."""
    global _problem
    if _problem is None or _problem[0] != recipe:
        made = Problem(*recipe[:5])
        made.price_with(*recipe[5:])
        _problem = recipe, made
    return score(_problem[1], config, proved, grid)


def _version() -> str:
    return version(PACKAGE)


@contextmanager
def cluster_evaluator(problem: Problem, address: str) -> Iterator[Run]:
    """Yield a function that scores a batch in order on the cluster at ``address`` (``host:port``, or ``auto``), one
    configuration a core at a time.

    Raises:
        ConfigError: nothing answers there, or its nodes lack this package, or have another version of it.
    """
    from piper_core.runtime.ray_session import RaySession

    session = RaySession(address, 0)
    running: list[Any] = []
    try:
        import ray

        _same_version(address)
        task, recipe = ray.remote(num_cpus=1)(evaluate), ray.put(recipe_of(problem))
        orders = problem.bounds.orders

        def unfinished() -> list[Any]:
            return ray.wait(running, num_returns=len(running), timeout=0)[1] if running else []

        def apart(batch: Sequence[Configuration], deadline_s: Callable[[], float], *, proved: bool = False) -> Outcomes:
            begun = [task.remote(recipe, config, proved, known_order(config, orders)) for config in batch]
            running[:] = [*unfinished(), *begun]

            return in_order(batch, begun, lambda future, seconds: ray.get(future, timeout=seconds), deadline_s, orders)

        yield apart
        for future in unfinished():
            ray.cancel(future, force=True)
    finally:
        session.close()


def _same_version(address: str) -> None:
    """Check that workers have this package.

    Raises:
        ConfigError: they do not.
    """
    import ray

    try:
        there = ray.get(ray.remote(num_cpus=1)(_version).remote(), timeout=120.0)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(f"--address {address[:100]}: no core of the cluster became free in two minutes") from None
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1][:200]
        text = f"--address {address[:100]}: its nodes cannot run {PACKAGE} ({why}); install it there"
        raise ConfigError(text) from None
    if there != _version():
        raise ConfigError(f"--address {address[:100]}: its nodes have {PACKAGE} {there}, this is {_version()}; "
                          "install the same there")  # fmt: skip
