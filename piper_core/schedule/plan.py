"""The plan: for each row and stream, the actions in order. Verifier, simulator, runtime and pictures read this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_core.ir.action import Action, ActionKind
from piper_core.ir.shard_state import Groups, Ranks
from piper_core.names import Sync

KINDS = tuple(ActionKind)
CODE = {kind: code for code, kind in enumerate(KINDS)}


class StreamKind(IntEnum):
    """What a stream runs. Each end of each channel is a stream of its own."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    COLLECTIVE = 3


@dataclass(frozen=True, slots=True)
class Stream:
    """One queue of a row; its actions are ``Plan.start[i]`` to ``Plan.start[i + 1]``."""

    row: int
    kind: StreamKind
    name: str


@dataclass(frozen=True, slots=True)
class Channel:
    """A one-way line of messages between two rows; its k-th send meets its k-th receive."""

    source: int
    destination: int
    label: str


@dataclass(frozen=True, slots=True)
class Communicator:
    """Rows whose k-th collectives on it meet; ``groups`` are the groups of ranks that each exchange."""

    rows: tuple[int, ...]
    groups: Groups
    label: str


class Reduction(StrEnum):
    """How often a bucket's gradient is reduced."""

    NONE = "none"
    STEP = "step"
    EACH = "each"


@dataclass(frozen=True, slots=True)
class BucketUse:
    """A bucket as the plan sees it: its stage; whether it is gathered and freed for each use (ZeRO-3); how often its
    gradient is reduced; and the parts (labels of an opened macro, -1 the whole) that read it in a forward, read it in
    a backward, read it in an R of its own, and add to its gradient. ``forward``, ``backward`` and ``again`` are empty
    where no gather serves them."""

    stage: int
    each_use: bool
    reduction: Reduction
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: tuple[int, ...]
    weight: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of an opened macro: compute, or a collective on a stream of its own (``inner``).

    ``reads`` are the pieces (positions in the same macro) whose results it takes; ``takes`` says whether it also
    takes what other stages (or, for BW, BI) hand in, ``gives`` whether it makes what other stages take.
    """

    label: int
    inner: bool
    reads: tuple[int, ...]
    takes: bool
    gives: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions, stored stream by stream.

    Per action, shape (A,): ``kind`` (index into ``KINDS``), ``stage``, ``microbatch`` (-1 none), ``bucket`` (-1 none),
    ``label`` (index into ``labels``, -1 none), ``line`` (index into ``lines``: the channel or communicator that it
    meets others on, -1 none). ``wait_start`` (A + 1,) and ``waits``: indices of actions on other streams of the
    same row that must end before it starts. ``start`` (S + 1,): first action of each stream.

    ``inputs[s]`` are the stages whose activations stage s takes. ``repeated[s]`` are the microbatches whose forward
    stage s runs again as an action of its own. ``parts`` maps (stage, kind) to the ways in which a macro action may
    be cut. ``derived`` are the rows whose order the list scheduler made.
    ``lanes`` (after :func:`expand`) is each row's position in the group it came from: lanes repeat one another.
    ``unit`` maps the DAG's nodes to actions (-1 none; empty when the plan was read from text).
    """

    rows: tuple[Ranks, ...]
    microbatches: int
    inputs: tuple[tuple[int, ...], ...]
    streams: tuple[Stream, ...]
    lines: tuple[Channel | Communicator, ...]
    labels: tuple[str, ...]
    buckets: tuple[BucketUse, ...]
    start: NDArray[np.integer[Any]]
    kind: NDArray[np.integer[Any]]
    stage: NDArray[np.integer[Any]]
    microbatch: NDArray[np.integer[Any]]
    bucket: NDArray[np.integer[Any]]
    label: NDArray[np.integer[Any]]
    line: NDArray[np.integer[Any]]
    wait_start: NDArray[np.integer[Any]]
    waits: NDArray[np.integer[Any]]
    repeated: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[int, str, tuple[tuple[Part, ...], ...]], ...] = ()
    derived: tuple[int, ...] = ()
    sync: Sync = Sync.GLOBAL_NORM
    lanes: tuple[int, ...] = ()
    unit: NDArray[np.integer[Any]] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.inputs)

    def action(self, index: int) -> Action:
        """Return one action as a record."""
        microbatch, bucket, label = (int(column[index]) for column in (self.microbatch, self.bucket, self.label))
        return Action(
            max(0, int(self.stage[index])),
            KINDS[int(self.kind[index])],
            None if microbatch < 0 else microbatch,
            None if label < 0 else self.labels[label],
            None if bucket < 0 else bucket,
        )

    def stream_of(self) -> NDArray[np.integer[Any]]:
        """Return the stream of each action, shape (A,)."""
        return np.repeat(np.arange(len(self.streams), dtype=np.int32), np.diff(self.start))

    def actions(self, stream: int) -> Iterator[Action]:
        """Yield the actions of one stream in order."""
        return (self.action(i) for i in range(int(self.start[stream]), int(self.start[stream + 1])))

    def compute_stream(self, row: int) -> int:
        """Return the index of a row's compute stream."""
        return next(i for i, s in enumerate(self.streams) if s.row == row and s.kind is StreamKind.COMPUTE)

    def grid(self, width: int = 0) -> str:
        """Return the compute order, a line a row, overlap and communication left out (cut to ``width`` if given)."""
        lines = []
        for row in range(len(self.rows)):
            words = [str(a) for a in self.actions(self.compute_stream(row)) if a.kind is not ActionKind.FREE]
            line = f"{row}: " + " ".join(words)
            lines.append(line if not width or len(line) <= width else line[: width - 4] + " ...")
        return "\n".join(lines)

    def same_as(self, other: Plan) -> bool:
        """Compare two plans, leaving aside which DAG nodes they came from."""
        columns = ("start", "kind", "stage", "microbatch", "bucket", "label", "line", "wait_start", "waits")
        tables = (
            "rows",
            "microbatches",
            "inputs",
            "streams",
            "lines",
            "labels",
            "buckets",
            "repeated",
            "parts",
            "derived",
            "sync",
            "lanes",
        )
        return all(np.array_equal(getattr(self, c), getattr(other, c)) for c in columns) and all(
            getattr(self, t) == getattr(other, t) for t in tables
        )


def assemble(
    base: dict[str, Any],
    streams: Sequence[tuple[Stream, Sequence[tuple[int, int, int, int, int, int]]]],
    waits: Sequence[Sequence[Sequence[tuple[int, int]]]],
) -> Plan:
    """Build a plan from rows of action columns.

    ``streams[i]`` is (stream, its actions as (kind, stage, microbatch, bucket, label, line)); ``waits[i][j]`` are
    the (stream, position) that action j of stream i waits for.
    """
    start = np.zeros(len(streams) + 1, np.int32)
    start[1:] = np.cumsum([len(actions) for _, actions in streams])
    table = np.asarray([a for _, actions in streams for a in actions], np.int32).reshape(-1, 6)
    flat = [[int(start[s]) + p for s, p in wait] for stream in waits for wait in stream]
    wait_start = np.zeros(len(flat) + 1, np.int32)
    wait_start[1:] = np.cumsum([len(wait) for wait in flat])
    return Plan(
        streams=tuple(stream for stream, _ in streams),
        start=start,
        kind=table[:, 0],
        stage=table[:, 1],
        microbatch=table[:, 2],
        bucket=table[:, 3],
        label=table[:, 4],
        line=table[:, 5],
        wait_start=wait_start,
        waits=np.asarray([w for wait in flat for w in wait], np.int32),
        **base,
    )


def expand(plan: Plan) -> Plan:
    """Return the plan with one row for each process.

    Messages pair equal positions of the two rows; a communicator becomes one for each of its groups, so that
    members of one group may be compared.
    """
    size = len(plan.rows[0])
    rows = tuple((rank,) for row in plan.rows for rank in row)
    row_of = {ranks[0]: i for i, ranks in enumerate(rows)}
    lines: list[Channel | Communicator] = []
    line_of: dict[tuple[int, int], int] = {}
    for index, line in enumerate(plan.lines):
        if isinstance(line, Channel):
            for position in range(size):
                a, b = plan.rows[line.source][position], plan.rows[line.destination][position]
                line_of[index, a] = line_of[index, b] = len(lines)
                lines.append(Channel(row_of[a], row_of[b], line.label))
        else:
            for group in line.groups:
                line_of.update({(index, rank): len(lines) for rank in group})
                lines.append(Communicator(tuple(row_of[rank] for rank in group), (group,), line.label))
    streams: list[tuple[Stream, list[tuple[int, int, int, int, int, int]]]] = []
    waits: list[list[list[tuple[int, int]]]] = []
    columns = [c.tolist() for c in (plan.kind, plan.stage, plan.microbatch, plan.bucket, plan.label, plan.line)]
    stream_of = plan.stream_of().tolist()
    start, wait_start, all_waits = plan.start.tolist(), plan.wait_start.tolist(), plan.waits.tolist()
    for row, ranks in enumerate(plan.rows):
        mine = [i for i, stream in enumerate(plan.streams) if stream.row == row]
        for rank in ranks:
            local = {s: len(streams) + k for k, s in enumerate(mine)}
            for s in mine:
                actions, held = [], []
                for i in range(start[s], start[s + 1]):
                    kind, stage, microbatch, bucket, label, line = (column[i] for column in columns)
                    actions.append((kind, stage, microbatch, bucket, label, line_of.get((line, rank), -1)))
                    held.append(
                        [
                            (local[stream_of[w]], w - start[stream_of[w]])
                            for w in all_waits[wait_start[i] : wait_start[i + 1]]
                        ]
                    )
                streams.append((replace(plan.streams[s], row=row_of[rank]), actions))
                waits.append(held)
    base = {
        name: getattr(plan, name)
        for name in ("microbatches", "inputs", "labels", "buckets", "repeated", "parts", "sync")
    }
    derived = tuple(row_of[rank] for row in plan.derived for rank in plan.rows[row])
    lanes = tuple(position for row in plan.rows for position in range(len(row)))
    return assemble(base | {"rows": rows, "lines": tuple(lines), "derived": derived, "lanes": lanes}, streams, waits)
