"""Sharded checkpoints, which a strategy with other degrees, ZeRO stages or schedule can load.

Every rank writes what it holds of each parameter (weights in full precision and states of the optimizer) as boxes of
the whole tensor, with ``torch.distributed.checkpoint``; who holds the same box writes it once. A rank's part of a flat
bucket is a run of elements of a parameter, and a run of elements of an n-dimensional tensor is at most 2n - 1 boxes.

A folder holds checkpoints ``step-N`` and a file ``latest`` that names the one to load. A new one is written aside and
named when it is whole, so that at any moment ``latest`` names a whole one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from piper_core.errors import ConfigError
from piper_core.runtime.optimizer import STEP, kinds
from piper_core.runtime.program import RankProgram

LATEST, ABOUT = "latest", "about.json"
_UNREADABLE = (OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ImportError, UnpicklingError)
"""What reading a pickle that was damaged raises."""
Shape = tuple[int, ...]


def boxes(shape: Shape, start: int, count: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield the boxes (offsets, sizes, elements before it) that ``count`` elements of a tensor from ``start`` on are,
    in row-major order."""
    if not shape:
        yield (), (), 0
        return
    inner, done = prod(shape[1:]), 0
    while done < count:
        row, within = divmod(start + done, inner)
        if within or count - done < inner:
            part = min(inner - within, count - done)
            for offsets, sizes, before in boxes(shape[1:], within, part):
                yield (row, *offsets), (1, *sizes), done + before
            done += part
        else:
            rows = (count - done) // inner
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), done
            done += rows * inner


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a whole tensor: where it begins there, and its values, which loading writes into."""

    offsets: Shape
    values: Tensor


class Boxes:
    """What a rank holds of one whole tensor; keeps the protocol of ``torch.distributed.checkpoint`` for objects that
    write and read parts (``__create_write_items__``, ``__create_chunk_list__``)."""

    def __init__(self, shape: Shape, held: Sequence[Box]) -> None:
        self.shape = torch.Size(shape)
        self.by_offset = {torch.Size(each.offsets): each.values for each in held}

    def size(self) -> torch.Size:
        return self.shape

    def part(self, index: MetadataIndex) -> Tensor:
        """Return the values of one box."""
        assert index.offset is not None, "a box has a place"
        return self.by_offset[index.offset]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, values.shape) for offsets, values in self.by_offset.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.by_offset[chunk.offsets]), self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip


class _Save(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].part(index)


class _Load(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the state as it is; the default makes copies of what is no tensor."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Boxes = self.state_dict[index.fqn]
        return found.part(index)


def state_of(program: RankProgram) -> dict[str, Boxes]:
    """Return all that a rank must keep, by name: ``weight/``, ``exp_avg/`` and so on, then the parameter's name."""
    degrees = program.lowering.degrees.by_axis()
    found: dict[str, tuple[Shape, list[Box]]] = {}
    for stage, storage in program.sync.stages.items():
        states = _states(program, stage)
        for at, run in enumerate(storage.runs):
            kinds = {"weight": run.master, **states[at]}
            slots = {slot.name: slot.shape for slot in run.slots}
            for kind, flat in kinds.items():
                for name, (start, values) in run.pieces(flat).items():
                    shape, origin = list(slots[name]), [0] * len(slots[name])
                    for axis, dim in reversed(storage.shares[name]):  # the last division is the innermost
                        origin[dim] += program.place[axis] * shape[dim]
                        shape[dim] *= degrees[axis]
                    _, held = found.setdefault(f"{kind}/{name}", (tuple(shape), []))
                    for offsets, sizes, before in boxes(slots[name], start, values.numel()):
                        place = tuple(a + b for a, b in zip(origin, offsets, strict=True))
                        held.append(Box(place, values[before : before + prod(sizes)].view(sizes)))
    made = {name: Boxes(shape, held) for name, (shape, held) in found.items()}
    for layer, bias in program.balance.biases.items():
        made[f"balance/{layer}"] = Boxes(tuple(bias.shape), [Box((0,) * bias.dim(), bias)])
    return made


def _states(program: RankProgram, stage: int) -> list[dict[str, Tensor]]:
    """Return the optimizer's states of each run of a stage, as long as the run's master weights; those that it would
    only make in its first step are made here, of zeros, which is the same."""
    optimizer = program.sync.optimizers.get(stage)
    if optimizer is None:
        return []
    optimizer.prepare()
    return [{kind: state[kind] for kind in kinds(optimizer.config)} for state in optimizer.states]


@contextmanager
def _failures() -> Iterator[None]:
    """Turn the exception in which torch gathers those of all ranks, which is no ``Exception``, into the first one."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ConfigError(f"rank {rank}: {type(cause).__name__}: {str(cause)[:200]}") from cause


def write(program: RankProgram, folder: Path) -> None:
    """Write a rank's part into a folder that is new; all ranks of the run do so together."""
    with _failures():
        save(state_of(program), checkpoint_id=folder, planner=_Save())


def read(program: RankProgram, folder: Path) -> None:
    """Read a rank's part into its weights and states; all ranks of the run do so together."""
    steps = int(json.loads((folder / ABOUT).read_text(encoding="utf-8"))["steps"])
    with _failures():
        load(state_of(program), checkpoint_id=folder, planner=_Load())
    for stage, storage in program.sync.stages.items():
        for run in storage.runs:
            run.updated()
        optimizer = program.sync.optimizers.get(stage)
        for state in optimizer.states if optimizer is not None else ():
            if STEP in state:
                state[STEP].fill_(float(steps))


# --- the folder, as the one who calls all ranks sees it ---


def check_target(folder: Path) -> None:
    """Refuse a folder that no checkpoint could be written to, before anything is trained; nothing is made.

    Raises:
        ConfigError: it is a file, or is nowhere where this process may write.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"cannot write a checkpoint to {folder}: {there} is no folder; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write a checkpoint to {folder}: {there} cannot be written to; name another folder")


def begin(folder: Path, steps: int) -> Path:
    """Return the folder, not there yet, that ranks write the checkpoint of ``steps`` to.

    Raises:
        ConfigError: it cannot be made.
    """
    part = folder / f".step-{steps}.{os.getpid()}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to {folder}: {error.strerror}; name another folder") from None
    return part


def commit(part: Path, about: Mapping[str, Any]) -> Path:
    """Make a checkpoint that is whole the latest one, then drop the others; return its folder."""
    folder, steps = part.parent, about["steps"]
    (part / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    _flush(part)
    name, turn = f"step-{steps}", 1
    while (folder / name).exists():  # of an earlier run; it stays until latest names another
        turn += 1
        name = f"step-{steps}-{turn}"
    part.rename(folder / name)
    aside = folder / f".{LATEST}.{os.getpid()}"
    aside.write_text(name, encoding="utf-8")
    _flush(folder)
    aside.replace(folder / LATEST)
    for other in folder.glob("step-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return folder / name


def _flush(folder: Path) -> None:
    """Force the files of a folder to disk."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def find(folder: Path, about: Mapping[str, Any]) -> tuple[Path, int]:
    """Return the latest whole checkpoint in a folder, and how many steps it has seen.

    Raises:
        ConfigError: there is none, or it is of another model or optimizer.
    """
    try:
        found = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        known = json.loads((found / ABOUT).read_text(encoding="utf-8"))
        steps = int(known["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder} holds no whole checkpoint: no readable file {LATEST} that names one") from None
    for name, value in about.items():
        if name != "steps" and known.get(name) != value:
            raise ConfigError(f"the checkpoint in {folder} is of {name} {known.get(name)}, this run has {value}")
    return found, steps


def check_parts(found: Path) -> None:
    """Refuse a checkpoint of which parts are missing or cut off.

    Raises:
        ConfigError: with what is wrong.
    """
    try:
        parts = FileSystemReader(found).read_metadata().storage_data
    except _UNREADABLE as error:
        raise ConfigError(f"the checkpoint in {found} is broken: its list of parts cannot be read "
                          f"({type(error).__name__}); load another, or train anew") from None  # fmt: skip
    ends: dict[str, int] = {}
    for part in parts.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        path = found / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            what = f"holds {size:,} bytes of {end:,}" if size >= 0 else "is missing"
            raise ConfigError(f"the checkpoint in {found} is broken: {name} {what}; load another, or train anew")
