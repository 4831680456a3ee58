"""Write a strategy for a person: YAML with a comment on each block of directives, one order line a row."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from piper_core.directives import Directive, Order, Place, RecomputeDirective, Replicate, Shard, Split, Stage
from piper_core.errors import ProgramError
from piper_core.ir.action import format_slots

# Words that stay text in YAML 1.1 and 1.2 without quotes.
_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n)$)[A-Za-z_][\w./=-]*", re.ASCII | re.IGNORECASE)
_HIDDEN = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def to_json(header: Mapping[str, Any], directives: Sequence[Directive[Any]]) -> str:
    """Return a strategy as JSON, one header field or directive a line."""
    fields = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in header.items()]
    program = ",\n".join("    " + json.dumps(directive.to_data()) for directive in directives)
    fields.append(f'  "directives": [\n{program}\n  ]' if directives else '  "directives": []')
    return "{\n" + ",\n".join(fields) + "\n}\n"


def to_yaml(header: Mapping[str, Any], directives: Sequence[Directive[Any]], *, comments: bool = True) -> str:
    """Return a strategy as YAML: the header, then the directives, a comment before each run of one op."""
    return "\n".join(_lines(header, directives, comments)) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: aside first, then moved into place.

    Raises:
        ProgramError: the file cannot be written there.
    """
    if not path.name or path.is_dir():
        raise ProgramError("cannot write the file: it is a folder; name a file in it", where=str(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            aside.write_text(text, encoding="utf-8", newline="\n")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ProgramError(f"cannot write the file: {reason}", where=str(path)) from None


def _lines(header: Mapping[str, Any], directives: Sequence[Directive[Any]], comments: bool) -> Iterator[str]:
    for name, value in header.items():
        if isinstance(value, dict) and value:
            yield f"{name}:"
            yield from (f"  {_text(key)}: {flow(item)}" for key, item in value.items())
        else:
            yield f"{name}: {flow(value)}"
    yield "directives:" if directives else "directives: []"
    for _, run in groupby(directives, key=type):
        block = list(run)
        if comments:
            yield f"  # {describe(block)}"
        for directive in block:
            yield from _directive(directive)


def _directive(directive: Directive[Any]) -> Iterator[str]:
    if not isinstance(directive, Order):
        yield f"  - {flow(directive.to_data())}"
        return
    yield f"  - op: {directive.op}"
    if directive.actions:
        yield "    actions:"
        yield from (f"      {row}: {format_slots(slots)}" for row, slots in directive.actions)
    else:
        yield "    filters:"
        yield from (f"      - {flow([item.to_data() for item in group])}" for group in directive.filters)


def flow(value: Any) -> str:
    """Return JSON data on one line, without the quotes that YAML does not need."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_text(key)}: {flow(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(flow, value)) + "]"
        case str():
            return _text(value)
        case _:
            return json.dumps(value)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


# --- comments ---


def describe(block: Sequence[Directive[Any]]) -> str:
    """Say in one line what directives of one kind do."""
    match block[0]:
        case Stage() as stage:
            return _stages(stage)
        case Split() as split:
            return _count(split.num_microbatches, "microbatch", "es")
        case Place():
            placed = [directive for directive in block if isinstance(directive, Place)]
            rows = {directive.devices for directive in placed}
            return f"{_count(len(rows), 'pipeline row')} of {_count(len(placed[0].devices), 'rank')}"
        case Shard():
            return "sharded: " + _each(_shard(shard) for shard in block if isinstance(shard, Shard))
        case Replicate():
            return "data parallel: " + _each(_replicate(each) for each in block if isinstance(each, Replicate))
        case RecomputeDirective():
            return "recompute: " + _each(str(each.policy) for each in block if isinstance(each, RecomputeDirective))
        case Order() as order:
            if not order.actions:
                return "what runs before what; groups of several may overlap"
            return "what each row runs, in order; actions in parentheses may overlap"
        case other:
            return other.op


def _stages(stage: Stage) -> str:
    if stage.layers_per_stage:
        low, high = min(stage.layers_per_stage), max(stage.layers_per_stage)
        layers = _count(high, "layer") if low == high else f"{low} to {high} layers"
        return f"{_count(len(stage.layers_per_stage), 'pipeline stage')} of {layers}"
    if stage.stages:
        return f"{_count(stage.stages, 'pipeline stage')}, the heaviest as light as can be"
    return f"{_count(len(stage.cuts or ()) + 1, 'pipeline stage')}, cut before the layers named"


def _shard(shard: Shard) -> str:
    over = f"axis {shard.axis}" if shard.axis else _count(len(shard.devices[0]), "rank")
    return f"{shard.kind} over {over}"


def _replicate(replicate: Replicate) -> str:
    over = f"axis {replicate.axis}" if replicate.axis else _count(len(replicate.devices[0]), "replica")
    zero = 3 if replicate.shard_params else 2 if replicate.shard_grads else 1 if replicate.shard_optimizer else 0
    size = f", buckets of {replicate.bucket_size} MiB" if replicate.bucket_size else ""
    return f"{over}, ZeRO-{zero}{size}"


def _each(words: Iterable[str]) -> str:
    """Join what several directives do, each said once, with how many do it where they differ."""
    counts = Counter(words)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{word} ({n}x)" for word, n in counts.items())


def _count(n: int, word: str, plural: str = "s") -> str:
    return f"{n} {word}{'' if n == 1 else plural}"
