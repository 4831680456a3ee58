"""The small double of a strategy that a rehearsal runs: the same directives, on few ranks, microbatches and layers.

What stays: stages and rows, the order of every row, overlap groups, streams, BI and BW, recompute, ZeRO stages, buckets
(of about as many layers), every kind of division, uneven use of rows. What shrinks: one layer a stage; groups of data,
tensor, expert and context ranks to two; microbatches to as many as fill the pipeline, or fewer where time is short;
widths, vocabulary and sequence to next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.ir.action import Slot, format_slots, parse_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.program.strategy import Header, Strategy

MOST = 2
"""Ranks that are left of each group."""
WORK = 480
"""Most ranks of a row x stages x microbatches: what runs within seconds. Those of a mixture of experts count thrice."""
_SEQUENCE = 16
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A strategy's double, its model and the DAG to apply it to."""

    strategy: Strategy
    architecture: Architecture
    base: Dag
    of: str


def proxy(strategy: Strategy, architecture: Architecture) -> Proxy:
    """Return the double of a strategy for a built-in architecture.

    Raises:
        ConfigError: a program that gives no stages, microbatches or ranks to shrink.
    """
    data = [dict(each) for each in strategy.program.to_data()]
    counts = _layers_per_stage(data, architecture.layers)
    ranks = _Ranks(data, strategy.header.mesh)
    small = tuple(min(1, count) for count in counts)
    split = _only(data, "split")
    work = len(counts) * ranks.lanes * (3 if architecture.experts else 1)
    chosen = _microbatches(data, split, len(ranks.rows), work)
    layers = _layer_map(counts)
    made = [_shrunk(each, ranks, {m: i for i, m in enumerate(chosen)}, layers, split["dim_name"]) for each in data]
    made = [each for each in made if each]
    for each in made:
        if each["op"] == "stage":
            each.clear()
            each.update(op="stage", layers_per_stage=list(small))
        elif each["op"] == "split":
            each["num_microbatches"] = len(chosen)
    model = _small(architecture, counts, small)
    length = _SEQUENCE * ranks.degree("context")
    header = strategy.header
    chunks, whole = model_chunks(model, length), model_chunks(architecture, min(architecture.max_seq, 4096))
    heavy = max(1, round(whole.parameters / architecture.layers * 2 / (chunks.parameters / model.layers)))
    batch = len(chosen) * ranks.replicas
    small_header = Header(
        model=None, mesh=ranks.mesh, global_batch=batch, seq_len=length, micro_batch=1, sync=header.sync,
        reduction=header.reduction, schedule=header.schedule,
    )  # fmt: skip
    base = training_dag(replace(chunks, dtype_bytes=heavy), global_batch=batch, sync=header.sync)
    text = (
        f"{len(ranks.kept)} of {ranks.size} ranks, {model.layers} of {architecture.layers} layers, "
        f"{len(chosen)} of {split['num_microbatches']} microbatches, hidden size {model.hidden}"
    )
    return Proxy(Strategy(small_header, Program.parse(made)), model, base, text)


def _only(data: Sequence[Data], op: str) -> Data:
    found = [each for each in data if each["op"] == op]
    if len(found) != 1:
        raise ConfigError(f"a rehearsal needs one {op} directive, found {len(found)}; use --ranks real")
    return found[0]


def _layers_per_stage(data: Sequence[Data], layers: int) -> list[int]:
    stage = _only(data, "stage")
    if "layers_per_stage" in stage:
        return list(stage["layers_per_stage"])
    if "cuts" in stage:
        ends = [*stage["cuts"], layers]
        return [end - start for start, end in zip([0, *stage["cuts"]], ends, strict=True)]
    count = stage["stages"]
    return [layers // count + (s < layers % count) for s in range(count)]


class _Ranks:
    """Which ranks are left, and what they are called then."""

    def __init__(self, data: Sequence[Data], mesh: Mesh | None) -> None:
        places = [tuple(each["devices"]) for each in data if each["op"] == "place"]
        self.rows = list(dict.fromkeys(places))
        every = sorted({rank for row in self.rows for rank in row})
        if not every:
            raise ConfigError("a rehearsal needs place directives, which say where stages run; use --ranks real")
        self.size = len(every)
        self._kinds: dict[str, int] = {}
        limits: dict[str, int] = {}
        out: set[int] = set()
        for each in data:
            if each["op"] not in ("shard", "replicate"):
                continue
            if "axis" in each and mesh is not None:
                limits |= dict.fromkeys(each["axis"].split("+"), MOST)
            else:
                given = each["devices"]
                groups = given if given and isinstance(given[0], list) else [given]
                out |= {rank for group in groups for rank in group[MOST:]}
        if mesh is not None:
            sizes = {name: min(size, limits.get(name, size)) for name, size in mesh.axes}
            lanes = 1
            for name in limits:
                lanes *= sizes[name]
            if lanes > MOST**3 and "edp" in sizes:
                sizes["edp"] = 1
            limits = {name: sizes[name] for name in limits}
            at = {rank: dict(zip(mesh.names, mesh.coordinates(rank), strict=True)) for rank in every}
            out |= {rank for rank in every if any(at[rank][name] >= size for name, size in limits.items())}
            left = [at[rank] for rank in every if rank not in out]
            self.mesh: Mesh | None = Mesh(tuple((n, 1 + max(each[n] for each in left)) for n in mesh.names))
        else:
            self.mesh = None
        self.kept = [rank for rank in every if rank not in out]
        self.number = {rank: i for i, rank in enumerate(self.kept)}
        if self.mesh is not None and self.mesh.size != len(self.kept):
            raise ConfigError("a rehearsal cannot cut the mesh evenly; use --ranks real")
        self.lanes = len(self.devices(self.rows[0]))
        for each in data:
            if each["op"] == "shard" and each.get("kind", "expert") != "expert":
                self._kinds[each["kind"]] = self._size_of(each)

    def _size_of(self, each: Data) -> int:
        """Return the size of the groups that are left of a directive's."""
        if "axis" in each and self.mesh is not None:
            size = 1
            for name in each["axis"].split("+"):
                size *= self.mesh.degree(name)
            return size
        given = each["devices"]
        return len(self.devices(given[0] if isinstance(given[0], list) else given))

    def devices(self, given: Sequence[int]) -> list[int]:
        """Return a list of ranks, shrunk."""
        return [self.number[rank] for rank in given if rank in self.number]

    def degree(self, kind: str) -> int:
        """Return the size of the groups of a kind of division."""
        return self._kinds.get(kind, 1)

    @property
    def replicas(self) -> int:
        """Ranks of a row that have sequences of their own."""
        return self.lanes // (self.degree("tensor") * self.degree("sequence") * self.degree("context"))


def _microbatches(data: Sequence[Data], split: Data, rows: int, work: int) -> list[int]:
    """Return the microbatches that are left: the first of each part that a row has to itself."""
    count, name = split["num_microbatches"], split["dim_name"]
    places = [each["filter"] for each in data if each["op"] == "place"]
    parts = {tuple(_numbers(each[name], count)) for each in places if name in each}
    runs = sorted(parts) or [tuple(range(count))]
    wanted = min(max(4, 2 * rows), max(2, WORK // work))
    each = max(1, -(-wanted // len(runs)))
    if any("(" in str(text) for one in data if one["op"] == "order" for text in one.get("actions", {}).values()):
        each = max(each, 2)
    return [m for run in runs for m in run[:each]]


def _numbers(value: Any, count: int) -> Iterator[int]:
    """Yield the numbers that a filter's value matches below ``count``."""
    if value == "*":
        yield from range(count)
    elif isinstance(value, int):
        yield value
    elif isinstance(value, str) and "-" in value and value != "-":
        low, high = map(int, value.split("-"))
        yield from range(low, min(high + 1, count))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, count)


def _layer_map(counts: Sequence[int]) -> dict[int, int]:
    """Return the layer that stands for each layer: that of its stage."""
    found: dict[int, int] = {}
    ends, new = [*accumulate(counts)], 0
    for count, end in zip(counts, ends, strict=True):
        found |= dict.fromkeys(range(end - count, end), new)
        new += bool(count)
    return found


def _shrunk(each: Data, ranks: _Ranks, microbatch: Mapping[int, int], layers: Mapping[int, int], dim: str) -> Data:
    """Return a directive for fewer ranks, microbatches and layers; {} where nothing is left of it."""
    made = dict(each)
    if "devices" in made:
        given = made["devices"]
        if given and isinstance(given[0], list):
            made["devices"] = [left for group in given if (left := ranks.devices(group))]
        else:
            made["devices"] = ranks.devices(given)
    maps = {dim: microbatch, "LAYER": layers}
    if "filter" in made:
        made["filter"] = _filter(made["filter"], maps)
        if made["filter"] is None:
            return {}
    if "filters" in made:
        groups = [_group(group, maps) for group in made["filters"]]
        made["filters"] = [group for group in groups if group]
        if len(made["filters"]) < 2:
            return {}
    if "actions" in made:
        made["actions"] = {row: _row(text, microbatch) for row, text in made["actions"].items()}
    return made


def _group(group: Any, maps: Mapping[str, Mapping[int, int]]) -> Any:
    if isinstance(group, list):
        return [made for each in group if (made := _filter(each, maps)) is not None]
    return _filter(group, maps)


def _filter(given: Data, maps: Mapping[str, Mapping[int, int]]) -> Data | None:
    """Return a filter in the new numbers; None where it matched only what is left out."""
    made = dict(given)
    for tag, renumber in maps.items():
        value = made.get(tag)
        if value is None or value in ("*", "-"):
            continue
        numbers = sorted({renumber[n] for n in _numbers(value, 1 + max(renumber)) if n in renumber})
        if not numbers:
            return None
        made[tag] = numbers[0] if len(numbers) == 1 else numbers
    return made


def _row(text: Any, microbatch: Mapping[int, int]) -> str:
    """Return a row's order without the microbatches that are left out."""
    slots: tuple[Slot, ...] = parse_slots(text) if isinstance(text, str) else text
    left = (
        tuple(replace(a, microbatch=microbatch[m]) for a in slot if (m := a.microbatch) is not None and m in microbatch)
        for slot in slots
    )
    return format_slots(tuple(slot for slot in left if slot))


def _small(architecture: Architecture, counts: Sequence[int], small: Sequence[int]) -> Architecture:
    """Return an architecture of the same make with a layer for each stage that has any, and the least widths that two
    ranks of every kind can divide."""
    a = architecture
    firsts = [start for start, count in zip([0, *accumulate(counts)], counts, strict=False) if count]
    layers = sum(small)
    heads = 4
    latent = bool(a.kv_rank)
    return replace(
        a, name=f"{a.name} in small"[:60], layers=layers, hidden=16, heads=heads,
        kv_heads=heads if latent or a.kv_heads == a.heads else 2,
        head_dim=8 if latent else 4, ffn=32 if a.ffn else 0, vocab=32, max_seq=64,
        learned_positions=64 if a.learned_positions else 0,
        experts=4 if a.experts else 0, top_k=min(2, a.top_k), expert_ffn=16 if a.experts else 0,
        shared_ffn=16 if a.shared_ffn else 0, expert_groups=2 if a.expert_groups else 0,
        top_groups=1 if a.expert_groups else 0,
        dense_layers=min(sum(first < a.dense_layers for first in firsts), layers - 1) if a.dense_layers else 0,
        kv_rank=8 if latent else 0, q_rank=8 if a.q_rank else 0, rope_dim=4 if latent else 0,
        value_dim=4 if latent else 0, query_scale=4 if a.query_scale else 0,
    )  # fmt: skip
