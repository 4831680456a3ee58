"""Meshes: ranks named by coordinates along ordered axes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from piper_core.errors import ConfigError

_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ordered axes (name, size); ranks are row-major, so the last axis is the fastest and its groups are
    neighbours.

    Text form: ``pp=4,dp=2,tp=4``.

    Raises:
        ConfigError: no axes, a name twice, a size under 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise ConfigError(f"mesh needs distinct axes of size 1 or more, found {str(self)[:80]!r}")

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read the text form.

        Raises:
            ConfigError: the text is not ``name=size`` pairs joined by commas.
        """
        axes = []
        for part in text.split(","):
            match = _AXIS.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"mesh must read like pp=4,dp=2,tp=4, found {text[:80]!r}")
            axes.append((match[1], int(match[2])))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    def degree(self, name: str) -> int:
        """Return the size of an axis, 1 where the mesh has none of that name."""
        return dict(self.axes).get(name, 1)

    def stride(self, name: str) -> int:
        """Return the distance between neighbours along an axis.

        Raises:
            ConfigError: no such axis.
        """
        index = self._index(name)
        return prod(size for _, size in self.axes[index + 1 :])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the position of ``rank`` along each axis.

        Raises:
            ConfigError: the rank is not in the mesh.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is not in mesh {self}; ranks are 0 to {self.size - 1}")
        position = []
        for _, size in reversed(self.axes):
            rank, last = divmod(rank, size)
            position.append(last)
        return tuple(reversed(position))

    def rank(self, coordinates: Iterable[int]) -> int:
        """Return the rank at ``coordinates`` (one for each axis).

        Raises:
            ConfigError: wrong number of coordinates, or one out of range.
        """
        position = tuple(coordinates)
        if len(position) != len(self.axes) or not all(
            0 <= at < size for at, (_, size) in zip(position, self.axes, strict=True)
        ):
            raise ConfigError(f"coordinates {position} are not in mesh {self}")
        rank = 0
        for at, (_, size) in zip(position, self.axes, strict=True):
            rank = rank * size + at
        return rank

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Return the rank groups that vary along the named axes and agree on all others.

        Groups are in order of their first rank, members in mesh order. No names: one group a rank.

        Raises:
            ConfigError: no such axis.
        """
        varying = {self._index(name) for name in names}
        strides = [(self.stride(name), size) for name, size in self.axes]
        inner = [_walk(strides, index) for index in sorted(varying)]
        outer = [_walk(strides, index) for index in range(len(strides)) if index not in varying]
        members = [sum(parts) for parts in product(*inner)]
        return tuple(tuple(base + member for member in members) for base in map(sum, product(*outer)))

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"mesh {self} has no axis {name[:40]!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)


def _walk(strides: list[tuple[int, int]], index: int) -> range:
    """Offsets of an axis's positions."""
    stride, size = strides[index]
    return range(0, stride * size, stride)
