"""Why a space holds no configuration: numbers that nothing meets, or what was fixed and forbidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

from piper_core.arch.contract import legal_degrees
from piper_core.errors import InfeasibleError
from piper_core.names import ShardKind
from piper_core.program.strategy import MAX_GPUS
from search.space import Space, divisors

Asked: TypeAlias = tuple[str, str]
"""What narrows a space: an option, ``fix`` or ``forbid``, and an axis."""
FINE = ("bucket", "prefetch", "streams")


def asked_of(space: Space) -> list[Asked]:
    """Return all that narrows a space."""
    return [("fix", axis) for axis in space.fix] + [("forbid", axis) for axis in space.forbid]


def only(space: Space, kept: Sequence[Asked]) -> Space:
    """Return a space of which only some of what narrows it is kept."""
    fix = {axis: values for axis, values in space.fix.items() if ("fix", axis) in kept}
    return replace(space, fix=fix, forbid={axis: space.forbid[axis] for option, axis in kept if option == "forbid"})


def why_empty(space: Space) -> InfeasibleError:
    """Return an error that names the fewest of what was fixed and forbidden that leave nothing, and what each of those
    could be: with the others as they are or, where that is nothing, alone."""
    asked = asked_of(space)
    anything = replace(space, fix={}, forbid={}).axes()
    if not all(anything.values()):
        near = _near(space)
        return InfeasibleError(
            f"no pp x tp x cp x dp makes {space.gpus} GPUs for {space.architecture.name}: pp may be at most "
            f"{space.architecture.layers}, tp at most {space.gpus_per_node} and divide heads and widths, cp divide "
            f"half the sequence of {space.seq_len}, dp the global batch {space.global_batch}; "
            f"{' or '.join(map(str, near))} GPUs would do, or another global batch"
        )
    core = list(asked)
    for each in asked:
        fewer = [other for other in core if other != each]
        if not all(only(space, fewer).axes().values()):
            core = fewer
    others = {each: only(space, [other for other in asked if other != each]) for each in core}
    relaxed = {each: some for each, freed in others.items() if (some := _held(freed, each[1]))}
    if relaxed:
        as_they_are = "with the others as they are, " if len(asked) > 1 else ""
        return InfeasibleError(f"{_empty(space, core)}; {as_they_are}{_could_be(relaxed)}")
    alone = {each: anything[each[1]] for each in asked}
    said = f"{_empty(space, asked)}, and changing one of them is not enough"
    return InfeasibleError(f"{said}; each alone, {_could_be(alone)}")


def _near(space: Space) -> list[int]:
    """Return the nearest numbers of GPUs, below and above, that some degrees make."""
    arch, length = space.architecture, space.seq_len
    made = {1}
    for degrees in (
        range(1, arch.layers + 1),
        legal_degrees(arch, ShardKind.TENSOR, length, limit=space.gpus_per_node),
        legal_degrees(arch, ShardKind.CONTEXT, length, limit=length),
        divisors(space.global_batch),
    ):
        made = {gpus * degree for gpus in made for degree in degrees if gpus * degree <= MAX_GPUS}
    found = []
    for side in (sorted((g for g in made if g < space.gpus), reverse=True), sorted(g for g in made if g > space.gpus)):
        good = (g for g in side if all(replace(space, gpus=g, fix={}, forbid={}).axes().values()))
        found += list(islice(good, 1))
    return found


def _held(space: Space, axis: str) -> list[object]:
    """Return the values of an axis that a configuration of the space has. A space lists values of others beside a
    bucket, a prefetch or streams that none of them goes with, so where those are narrowed each value is tried."""
    axes = space.axes()
    if not all(axes.values()):
        return []
    if not {*FINE} & {*space.fix, *space.forbid}:
        return axes[axis]
    narrowed = ((value, replace(space, fix={**space.fix, axis: (str(value),)})) for value in axes[axis])
    return [value for value, one in narrowed if all(one.axes().values())]


def _empty(space: Space, asked: Sequence[Asked]) -> str:
    parts = []
    for option, narrowed in (("fix", space.fix), ("forbid", space.forbid)):
        if said := " ".join(f"{axis}={','.join(narrowed[axis])}" for kind, axis in asked if kind == option):
            parts.append(f"--{option} {said}")
    where = f"on {space.gpus} GPUs with global batch {space.global_batch}"
    return f"{' '.join(parts)} leaves no configuration {where}"


def _could_be(values: Mapping[Asked, Sequence[object]]) -> str:
    """Say what each axis could be, one that is forbidden values if it were not."""
    parts = []
    for (option, axis), some in values.items():
        without = f"without --forbid {axis}, " if option == "forbid" else ""
        parts.append(f"{without}{axis} could be {_listed(list(map(str, some)))}")
    return "; ".join(parts)


def _listed(values: Sequence[str], most: int = 12) -> str:
    return ", ".join(values if len(values) <= most else [*values[: most - 2], "...", values[-1]])
