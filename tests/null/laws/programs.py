"""Random programs over all directives: mostly legal, some not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.arch.synthetic import synthetic
from piper_core.errors import ScheduleError
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import Sync
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Layout, rows_of_stage


@dataclass(slots=True)
class Shape:
    """What a random program is made of: rows, ranks a row, virtual stages, microbatches, where stages lie."""

    p: int
    width: int
    v: int
    m: int
    layout: Layout
    moe: bool

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        return rows_of_stage(self.layout, self.p, self.v)

    def ranks(self, row: int) -> list[int]:
        return list(range(row * self.width, (row + 1) * self.width))

    def row(self, stage: int, microbatch: int) -> int:
        homes = self.homes[stage]
        return homes[0] if len(homes) == 1 or microbatch < (self.m + 1) // 2 else homes[1]


def program(rng: Random) -> tuple[Dag, list[dict[str, Any]]]:
    """Return a base DAG and a program for it."""
    layout = rng.choice([Layout.LOOP] * 3 + [Layout.V] * 2 + [Layout.BIDIRECTIONAL])
    p = rng.choice((1, 2, 2, 2, 3, 4)) if layout is not Layout.BIDIRECTIONAL else rng.choice((2, 2, 4))
    v = rng.choice((1, 1, 2)) if layout is Layout.LOOP else 2 if layout is Layout.V else 1
    m = rng.choice((1, 2, 3, 4, 4, 6)) if layout is not Layout.BIDIRECTIONAL else rng.choice((2, 4, 4, 6))
    shape = Shape(p, rng.choice((1, 2, 2, 4)), v, m, layout, rng.random() < 0.4)
    stages = len(shape.homes)
    layers = stages + rng.choice((0, 0, 1, 2, stages, 2 * stages))
    tagged = rng.random() < 0.5
    if not shape.moe and rng.random() < 0.15:
        arch = Architecture("tied", layers, 64, 256, 8, 8, 8, 256, tied=True)
        model, tagged = model_chunks(arch, 64), False
    else:
        hidden = rng.choice((64, 512))
        kind = "moe" if shape.moe else "dense"
        model = synthetic(f"{kind}:{layers}", stages if tagged else None, hidden=hidden)
    dag = training_dag(model, sync=rng.choice((Sync.GLOBAL_NORM, Sync.GLOBAL_NORM, Sync.NONE, Sync.POST_VALIDATION)))
    made: list[dict[str, Any]] = []
    if not tagged:
        made.append(_stage(rng, layers, stages))
    if m > 1 or rng.random() < 0.7:
        made.append({"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": m})
    elif layout is Layout.BIDIRECTIONAL:
        shape.layout = Layout.LOOP
    if p > 1 or rng.random() < 0.8:
        made += _places(rng, shape)
    made += _parallel(rng, shape)
    repeated = _recompute(rng, shape, made)
    if rng.random() < 0.75:
        made += _orders(rng, shape, repeated)
    if rng.random() < 0.5:
        rng.shuffle(made)
    if rng.random() < 0.12:
        _spoil(rng, made)
    return dag, made


def _stage(rng: Random, layers: int, stages: int) -> dict[str, Any]:
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    ends = [0, *cuts, layers]
    return rng.choice([
        {"op": "stage", "cuts": cuts},
        {"op": "stage", "layers_per_stage": [b - a for a, b in pairwise(ends)]},
        {"op": "stage", "stages": stages},
    ])  # fmt: skip


def _places(rng: Random, shape: Shape) -> list[dict[str, Any]]:
    stream = {"stream": "p2p"} if rng.random() < 0.3 else {}
    made: list[dict[str, Any]] = []
    for stage, homes in enumerate(shape.homes):
        half = (shape.m + 1) // 2
        for k, row in enumerate(homes):
            part = {} if len(homes) == 1 else {"MB": f"{0 if k == 0 else half}-{half - 1 if k == 0 else shape.m - 1}"}
            made.append({"op": "place", "filter": {"PP": stage, **part}, "devices": shape.ranks(row), **stream})
    return made


def _parallel(rng: Random, shape: Shape) -> list[dict[str, Any]]:
    """Shard and replicate on a grid of the ranks of each row."""
    n = shape.width
    if n == 1:
        return []
    inner = rng.choice([d for d in (1, 2, 4) if d <= n])
    made: list[dict[str, Any]] = []
    every = [shape.ranks(row) for row in range(shape.p)]
    near = [row[i : i + inner] for row in every for i in range(0, n, inner)]
    far = [row[i::inner] for row in every for i in range(inner)]
    if inner > 1:
        kind = rng.choice(("tensor", "sequence", "context"))
        made.append({"op": "shard", "filter": {}, "devices": near, "kind": kind})
        if kind == "context":
            made[-1]["method"] = rng.choice(("ring", "all_to_all"))
        if kind == "sequence" and rng.random() < 0.3:
            made[-1]["regather"] = False
        if rng.random() < 0.2:
            made[-1]["stream"] = rng.choice(("compute", "tp"))
    if shape.moe and n // inner > 1 and rng.random() < 0.7:
        made.append({"op": "shard", "filter": {"EP": "*"}, "devices": far, "stream": rng.choice(("ep", "compute"))})
    if rng.random() < 0.85:
        zero = rng.randrange(4) if shape.layout is not Layout.BIDIRECTIONAL or rng.random() < 0.1 else rng.randrange(2)
        flags = {"shard_optimizer": zero == 1, "shard_grads": zero >= 2, "shard_params": zero == 3}
        extra: dict[str, Any] = {"bucket_size": rng.choice((1, 2, 8))} if rng.random() < 0.5 else {}
        extra |= {"prefetch": rng.choice((0, 2, 3))} if rng.random() < 0.3 else {}
        extra |= {"reduce_stream": "r"} if rng.random() < 0.3 else {}
        groups = far if inner > 1 or rng.random() < 0.9 else [row[i : i + 2] for row in every for i in range(0, n, 2)]
        item = {"op": "replicate", "filter": {}, "devices": groups, **{k: v for k, v in flags.items() if v}, **extra}
        if rng.random() < 0.2:
            item |= {
                "filter": {"PP": 0},
                "devices": [g for g in groups if set(g) & {r for h in shape.homes[0] for r in shape.ranks(h)}],
            }
        made.append(item)
    return made


def _recompute(rng: Random, shape: Shape, made: list[dict[str, Any]]) -> set[int]:
    """Maybe add a recompute directive; return the stages of which an order may name R."""
    if rng.random() < 0.55:
        return set()
    stages = range(len(shape.homes))
    chosen = set(stages) if rng.random() < 0.6 else {rng.choice(stages)}
    where = {} if len(chosen) == len(stages) else {"PP": min(chosen)}
    made.append({"op": "recompute", "filter": where, "policy": rng.choice(("full", "selective"))})
    return chosen if rng.random() < 0.3 else set()


def _orders(rng: Random, shape: Shape, repeated: set[int]) -> list[dict[str, Any]]:
    pick = rng.random()
    if pick < 0.4:
        legal = [name for name in FAMILIES if get_family(name).layout is shape.layout]
        try:
            grid = get_family(rng.choice(legal)).grid(shape.p, shape.m, shape.v)
            return [{"op": "order", "actions": {str(r): format_slots(row) for r, row in enumerate(grid.rows)}}]
        except ScheduleError:
            pass
    if pick < 0.8:
        rows = _random_rows(rng, shape, repeated)
        if rng.random() < 0.15:  # a shuffled piece: cyclic with itself, or with another row, or not
            row = rng.choice(rows)
            at = rng.randrange(len(row))
            piece = row[at : at + 4]
            rng.shuffle(piece)
            row[at : at + 4] = piece
        named = {r: row for r, row in enumerate(rows) if rng.random() < 0.9}
        texts = {str(r): " ".join(_grouped(rng, row)) for r, row in named.items() if row}
        if texts:
            return [{"op": "order", "actions": texts}]
    made: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 1, 2))):
        stage, (a, b) = rng.randrange(len(shape.homes)), sorted((rng.randrange(shape.m), rng.randrange(shape.m)))
        first, second = rng.choice((("F", "F"), ("F", "B"), ("B", "F"), ("B", "B"), ("BI", "BW"), ("F", "BI")))
        groups = [[{"PP": stage, "MB": a, "PASS": first}], [{"PP": stage, "MB": b, "PASS": second}]]
        if rng.random() < 0.3 and a != b:
            groups[0].append({"PP": stage, "MB": b, "PASS": first})
        made.append({"op": "order", "filters": groups})
    return made


def _random_rows(rng: Random, shape: Shape, repeated: set[int]) -> list[list[str]]:
    """Run all compute in a random order that data allows; return what each row did."""
    stages = len(shape.homes)
    apart = rng.choice((set(), set(range(stages)), {s for s in range(stages) if rng.random() < 0.5}))
    done: set[tuple[str, int, int]] = set()
    rows: list[list[str]] = [[] for _ in range(shape.p)]
    todo = [(k, s, m) for s in range(stages) for m in range(shape.m)
            for k in ("F", *(("BI", "BW") if s in apart else ("B",)), *(("R",) if s in repeated else ()))]  # fmt: skip

    def ready(kind: str, s: int, m: int) -> bool:
        match kind:
            case "F":
                return s == 0 or ("F", s - 1, m) in done
            case "BW":
                return ("BI", s, m) in done
            case "R":
                return ("F", s, m) in done
            case _:
                above = s + 1 == stages or ("B", s + 1, m) in done or ("BI", s + 1, m) in done
                return above and ("R" if s in repeated else "F", s, m) in done

    while todo:
        item = rng.choice([t for t in todo if ready(*t)])
        todo.remove(item)
        done.add(item)
        kind, s, m = item
        rows[shape.row(s, m)].append(f"{s}{kind}{m}")
    return rows


def _grouped(rng: Random, row: list[str]) -> list[str]:
    """Put some neighbours into overlap groups."""
    out: list[str] = []
    for word in row:
        apart = out and re.split(r"[A-Z]+", out[-1])[-1] != re.split(r"[A-Z]+", word)[-1]
        if apart and out[-1][0] != "(" and rng.random() < 0.12:
            out[-1] = f"({out[-1]} {word})"
        else:
            out.append(word)
    return out


def _spoil(rng: Random, made: list[dict[str, Any]]) -> None:
    """Change one field, or leave a directive out, or say it twice."""
    item = rng.choice(made) if made else {}
    pick = rng.randrange(8)
    if pick == 0 and made:
        made.remove(item)
    elif pick == 1:
        made.append(dict(item))
    elif pick == 2 and "filter" in item:
        item["filter"] = rng.choice(({"PP": 99}, {"XX": 1}, {"PP": "*"}, {"MB": 0}, {"PASS": "F"}))
    elif pick == 3 and "devices" in item:
        item["devices"] = rng.choice(([], [0, 0], [0, 1, 2], [[0], [1, 2]], "all", [-1]))
    elif pick == 4 and "num_microbatches" in item:
        item["num_microbatches"] = rng.choice((0, -1, 1, 7, "2"))
    elif pick == 5 and item:
        item["op"] = rng.choice(("stage", "plase", None))
    elif pick == 6:
        item["extra"] = 1
    elif "actions" in item:
        item["actions"] = {row: text.replace("0", "1", 1) for row, text in item["actions"].items()}
