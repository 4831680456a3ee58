"""A strategy file: a header that says for what, then the program that says how."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from piper_core.errors import ConfigError, ProgramError
from piper_core.ir.dag import Dag, training_dag
from piper_core.mesh import Mesh
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.program.read import MAX_DEPTH, read_document
from piper_core.program.write import replace_file, to_json, to_yaml

if TYPE_CHECKING:
    from piper_core.arch.record import Architecture

Reduction = Literal["token", "microbatch"]

MAX_GPUS = 2**20
DEFAULT_SEQ_LEN = 4096
_SYNTHETIC = re.compile(r"(dense|moe):.*", re.DOTALL)
_COUNTS = ("gpus", "global_batch", "seq_len", "micro_batch")
_TEXTS = ("model", "cluster", "schedule")
_FREE = ("predicted", "measured", "versions")


@dataclass(frozen=True, slots=True)
class Header:
    """What a program was made for.

    ``model`` is a preset, the path of a Hugging Face config or a synthetic spec (``dense:24``); ``cluster`` an id
    such as ``p4de``; ``global_batch`` and ``micro_batch`` in sequences; ``schedule`` the family behind the order
    directives.
    ``predicted``, ``measured`` and ``versions`` are free mappings of JSON data, for people and reports.

    Raises:
        ProgramError: a field of the wrong type or out of range, or ``gpus`` that differ from the mesh.
    """

    model: str | None = None
    cluster: str | None = None
    mesh: Mesh | None = None
    gpus: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    sync: Sync = Sync.GLOBAL_NORM
    reduction: Reduction = "token"
    schedule: str | None = None
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip() or len(value) > 200):
                _wrong(name, "a short text", value)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31):
                _wrong(name, "an integer >= 1", value)
        if self.reduction not in ("token", "microbatch"):
            _wrong("reduction", "token or microbatch", self.reduction)
        for name in _FREE:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                _wrong(name, "a mapping", value)
            object.__setattr__(self, name, _plain(value, name))
        if (self.mesh.size if self.mesh else self.gpus or 1) > MAX_GPUS:
            _wrong("mesh" if self.mesh else "gpus", f"at most {MAX_GPUS} GPUs", str(self.mesh or self.gpus))
        if self.mesh and self.gpus not in (None, self.mesh.size):
            _wrong("gpus", f"{self.mesh.size}, the size of mesh {self.mesh}", self.gpus)

    @property
    def world(self) -> Mesh | None:
        """The mesh that devices must lie in: the header's own, else one axis ``rank`` of all its GPUs."""
        if self.mesh is None and self.gpus is not None:
            return Mesh((("rank", self.gpus),))
        return self.mesh

    def length(self, architecture: Architecture) -> int:
        """Return the tokens of a sequence of a model: ``seq_len``, or 4096 where there is none.

        Raises:
            ConfigError: the model takes fewer.
        """
        length, most = self.seq_len or DEFAULT_SEQ_LEN, architecture.max_seq
        if length > most:
            said = "header field seq_len:" if self.seq_len else "a header without seq_len means"
            which = "" if self.seq_len else ", which"
            raise ConfigError(f"{said} {length}{which} is longer than {architecture.name} allows: at most {most}")
        return length

    @staticmethod
    def parse(data: Mapping[str, Any]) -> Header:
        """Read the header's fields; the inverse of :meth:`to_data`.

        Raises:
            ProgramError: an unknown field (with the nearest known one), or a value that does not do.
        """
        values = {name: value for name, value in data.items() if value is not None}
        for name in data:
            if name not in _FIELDS:
                near = get_close_matches(name, (*_FIELDS, "directives"), n=1)
                hint = f"did you mean {near[0]}?" if near else ""
                known = ", ".join((*_FIELDS, "directives"))
                raise ProgramError(f"unknown header field {name[:40]!r}", expected=f"one of {known}", hint=hint)
        if "mesh" in values:
            values["mesh"] = _read_mesh(values["mesh"])
        if "sync" in values:
            if values["sync"] not in tuple(map(str, Sync)):
                _wrong("sync", "one of " + ", ".join(Sync), values["sync"])
            values["sync"] = Sync(values["sync"])
        return Header(**values)

    def to_data(self) -> dict[str, Any]:
        """Return the JSON form: ``sync`` and ``reduction`` always, other fields where they say something."""
        data = {name: getattr(self, name) for name in _FIELDS}
        data |= {"mesh": str(self.mesh) if self.mesh else None, "sync": str(self.sync)}
        return {name: value for name, value in data.items() if value is not None and value != {}}


_FIELDS = tuple(each.name for each in fields(Header))


@dataclass(frozen=True, slots=True)
class Strategy:
    """Everything that decides how one model trains on one cluster."""

    header: Header
    program: Program

    @staticmethod
    def parse(data: object) -> Strategy:
        """Read a mapping with ``directives``, or a bare list of directives as upstream Piper has them.

        A bare list has no header: no batch, and ``sync: none``, since upstream does not clip.

        Raises:
            ProgramError: the header.
            DirectiveError: a directive, with its position.
        """
        if isinstance(data, list | tuple):
            return Strategy(Header(sync=Sync.NONE), Program.parse(data))
        if not isinstance(data, Mapping):
            raise ProgramError("neither a list nor a mapping", expected="a strategy", found=repr(data)[:60])
        for name in data:
            if not isinstance(name, str):
                raise ProgramError("a header field that is not text", found=repr(name)[:40])
        header = Header.parse({name: value for name, value in data.items() if name != "directives"})
        if "directives" not in data:
            raise ProgramError("field 'directives' is missing", expected="a header with a list of directives")
        return Strategy(header, Program.parse(data["directives"]))

    def to_data(self) -> dict[str, Any]:
        """Return the JSON form; the inverse of :meth:`parse`."""
        return {**self.header.to_data(), "directives": self.program.to_data()}

    def to_text(self, *, comments: bool = True) -> str:
        """Return the YAML form, on which :func:`loads` is the inverse."""
        return to_yaml(self.header.to_data(), self.program.directives, comments=comments)


def load(path: str | PathLike[str]) -> Strategy:
    """Read a strategy file, JSON or YAML.

    Raises:
        ProgramError: the file or its header, see :func:`read_document`.
        DirectiveError: a directive, with its position.
    """
    data = read_document(Path(path))
    try:
        return Strategy.parse(data)
    except ProgramError as error:
        raise error.at(str(path)) from None


def loads(text: str) -> Strategy:
    """Read a strategy from text; errors as :func:`load`."""
    return Strategy.parse(read_document(text))


def dump(strategy: Strategy, path: str | PathLike[str], *, comments: bool = True) -> None:
    """Write a strategy file, whole or not at all: JSON where the name ends in ``.json``, else YAML.

    Raises:
        ProgramError: the file cannot be written there.
    """
    target = Path(path)
    if target.suffix == ".json":
        text = to_json(strategy.header.to_data(), strategy.program.directives)
    else:
        text = strategy.to_text(comments=comments)
    replace_file(target, text)


def base_dag(strategy: Strategy, *, synthetic: str | None = None, stages: int | None = None) -> Dag:
    """Return the training DAG that the strategy's program applies to.

    ``synthetic`` (``dense:24``, ``moe:24``) stands in for the header's model; ``stages`` gives its chunks PP
    tags, as a program without a stage directive needs. A header without ``seq_len`` means 4096 tokens, 64 for
    a synthetic model.

    Raises:
        ProgramError: no model, or ``stages`` for a model that is not synthetic.
        ConfigError: a model that is unknown, or that cannot take the sequence or the stages.
    """
    from piper_core.arch import load_architecture, model_chunks
    from piper_core.arch.synthetic import synthetic as synthetic_chunks

    header = strategy.header
    model = synthetic or header.model
    if model is None:
        raise ProgramError("the strategy names no model", expected="a header field model",
                           hint="or a synthetic one: --synthetic dense:24")  # fmt: skip
    if synthetic or _SYNTHETIC.fullmatch(model):
        size = {"seq_len": header.seq_len} if header.seq_len else {}
        chunks = synthetic_chunks(model, stages, **size)
    elif stages is not None:
        raise ProgramError(f"stages {stages} for model {model[:40]}", expected="a synthetic model",
                           hint="cut other models with a stage directive")  # fmt: skip
    else:
        architecture = load_architecture(model)
        chunks = model_chunks(architecture, header.length(architecture))
    return training_dag(chunks, global_batch=header.global_batch, sync=header.sync)


def _read_mesh(value: object) -> Mesh:
    """Read ``pp=4,dp=2`` or a mapping of axis sizes."""
    if isinstance(value, Mapping):
        for name, size in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or isinstance(size, bool) or not isinstance(size, int):
                _wrong("mesh", "axis sizes such as pp=4,dp=2", value)
        value = ",".join(f"{name}={size}" for name, size in value.items())
    if not isinstance(value, str):
        _wrong("mesh", "axis sizes such as pp=4,dp=2", value)
    try:
        return Mesh.parse(value)
    except ConfigError as error:
        raise ProgramError(str(error)) from None


def _plain(value: Any, name: str, depth: int = 1) -> Any:
    """Return JSON data as lists, dictionaries and finite numbers, all of its own.

    Raises:
        ProgramError: anything that a file cannot say.
    """
    if depth > MAX_DEPTH - 2:
        _wrong(name, f"at most {MAX_DEPTH} levels", "deeper nesting")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            _wrong(name, "keys that are text", value)
        return {key: _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, depth + 1) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    _wrong(name, "JSON data: text, finite numbers, lists, mappings", value)


def _wrong(name: str, expected: str, found: object) -> NoReturn:
    raise ProgramError(f"header field {name} does not do", expected=expected, found=repr(found)[:60])
