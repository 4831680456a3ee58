"""Plans as text: tables first, then one line a stream, each action with what it meets others on and waits for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from piper_core.errors import DirectiveError
from piper_core.ir.action import Action, ActionKind
from piper_core.names import Sync
from piper_core.schedule.plan import (
    CODE,
    BucketUse,
    Channel,
    Communicator,
    Part,
    Plan,
    Reduction,
    Stream,
    StreamKind,
    assemble,
)

_STREAM = re.compile(r"stream (\d+) row (\d+) (compute|send|recv|collective) (.*)")
_TOKEN = re.compile(r"([^@<]+)(?:@(\d+))?(?:<([\d.,]+))?")
_PIECE = re.compile(r"(<?)([^\s()!<>]+)(!?)\(([\d,]*)\)(>?)")
_CHANNEL = re.compile(r"channel \d+: (\d+)>(\d+) (.*)")
_COMMUNICATOR = re.compile(r"communicator \d+: rows ([\d,]+) groups ([\d,|]+) (.*)")
_BUCKET = re.compile(
    r"bucket \d+: stage (\d+), gathered (as it is|each use), reduced (none|step|each); "
    r"forward (.*); backward (.*); again (.*); weight (.*)"
)


def format_plan(plan: Plan) -> str:
    """Return the text of a plan; :func:`parse_plan` reads it back equal.

    A stream's line holds its actions; ``@3`` says that an action meets others on line 3 (a channel or
    communicator), ``<5.0,7.2`` that it waits for action 0 of stream 5 and action 2 of stream 7.
    """
    text = [f"plan sync {plan.sync} microbatches {plan.microbatches}"]
    text += [f"row {i}: {_numbers(ranks)}" for i, ranks in enumerate(plan.rows)]
    text += [f"stage {i}: from {_numbers(into)}" for i, into in enumerate(plan.inputs)]
    text += [f"repeated: {' '.join(map(_numbers, plan.repeated))}"] if plan.repeated else []
    text += [f"derived: {_numbers(plan.derived)}"] if plan.derived else []
    text += [f"lanes: {_numbers(plan.lanes)}"] if plan.lanes else []
    for i, line in enumerate(plan.lines):
        if isinstance(line, Channel):
            text.append(f"channel {i}: {line.source}>{line.destination} {_quote(line.label)}")
        else:
            groups = "|".join(map(_numbers, line.groups))
            text.append(f"communicator {i}: rows {_numbers(line.rows)} groups {groups} {_quote(line.label)}")
    text += [f"labels: {' '.join(plan.labels)}"] if plan.labels else []
    names = (*plan.labels, "*")
    for i, use in enumerate(plan.buckets):
        users = (use.forward, use.backward, use.again, use.weight)
        forward, backward, again, weight = (" ".join(names[k] for k in labels) or "-" for labels in users)
        text.append(
            f"bucket {i}: stage {use.stage}, gathered {'each use' if use.each_use else 'as it is'}, reduced "
            f"{use.reduction}; forward {forward}; backward {backward}; again {again}; weight {weight}"
        )
    for stage, kind, variants in plan.parts:
        text += [f"parts {stage} {kind}: {' '.join(_piece(part, names) for part in variant)}" for variant in variants]
    return "\n".join([*text, *_streams(plan)]) + "\n"


def parse_plan(text: str) -> Plan:
    """Read the text of a plan.

    Raises:
        DirectiveError: a line that cannot be read, with its number.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                reader.read(line.strip())
            except (ValueError, IndexError, KeyError, DirectiveError) as error:
                why = error.what if isinstance(error, DirectiveError) else "it does not read as a plan's"
                raise DirectiveError(f"line {number} of the plan: {why}", found=repr(line[:60])) from None
    return reader.plan()


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values)) or "-"


def _ints(text: str) -> tuple[int, ...]:
    return () if text in ("-", "") else tuple(map(int, text.split(",")))


def _quote(name: str) -> str:
    return name if re.fullmatch(r'[^\s:"]+', name) else json.dumps(name)


def _unquote(text: str) -> tuple[str, str]:
    """Return a name and the rest of the line after it and a colon."""
    if text.startswith('"'):
        name, end = json.JSONDecoder().raw_decode(text)
        return str(name), text[end:].removeprefix(":")
    name, _, rest = text.partition(":")
    return name, rest


def _piece(part: Part, names: tuple[str, ...]) -> str:
    reads = ",".join(map(str, part.reads))
    return f"{'<' * part.takes}{names[part.label]}{'!' * part.inner}({reads}){'>' * part.gives}"


def _streams(plan: Plan) -> Iterable[str]:
    start, wait_start, waits = plan.start.tolist(), plan.wait_start.tolist(), plan.waits.tolist()
    stream_of, lines = plan.stream_of().tolist(), plan.line.tolist()
    for s, stream in enumerate(plan.streams):
        words = []
        for i, action in enumerate(plan.actions(s), start[s]):
            held = [f"{stream_of[w]}.{w - start[stream_of[w]]}" for w in waits[wait_start[i] : wait_start[i + 1]]]
            line = f"@{lines[i]}" if lines[i] >= 0 else ""
            words.append(f"{action}{line}{'<' + ','.join(held) if held else ''}")
        yield f"stream {s} row {stream.row} {stream.kind.name.lower()} {_quote(stream.name)}: {' '.join(words)}"


class _Reader:
    """The tables of a plan, line by line."""

    def __init__(self) -> None:
        self.base: dict[str, Any] = {
            "rows": (),
            "inputs": (),
            "lines": (),
            "labels": (),
            "buckets": (),
            "microbatches": 1,
        }
        self.parts: dict[tuple[int, str], list[tuple[Part, ...]]] = {}
        self.streams: list[tuple[Stream, list[tuple[int, int, int, int, int, int]]]] = []
        self.waits: list[list[list[tuple[int, int]]]] = []
        self.label: dict[str, int] = {"*": -1}

    def read(self, line: str) -> None:
        """Read one line.

        Raises:
            ValueError, KeyError, DirectiveError: it cannot be read.
        """
        if re.search(r"\d{10}", line):
            raise DirectiveError("a number is too large")
        word, _, rest = line.partition(":")
        rest = rest.strip()
        readers: dict[str, Callable[[str, str, str], None]] = {
            "plan": self._plan, "channel": self._line, "communicator": self._line, "bucket": self._bucket,
            "parts": self._parts, "stream": self._stream,
        }  # fmt: skip
        first = word.split()[0]
        if first in readers:
            readers[first](line, word, rest)
        elif first == "row":
            self.base["rows"] += (_ints(rest),)
        elif first == "stage":
            self.base["inputs"] += (_ints(rest.removeprefix("from ")),)
        elif first == "repeated":
            self.base["repeated"] = tuple(map(_ints, rest.split()))
        elif first in ("derived", "lanes"):
            self.base[first] = _ints(rest)
        elif first == "labels":
            self.base["labels"] = tuple(rest.split())
            self.label |= {name: i for i, name in enumerate(self.base["labels"])}
        else:
            raise ValueError(first)

    def plan(self) -> Plan:
        """Return what was read.

        Raises:
            DirectiveError: no streams, or a wait for an action that does not exist.
        """
        if not self.streams:
            raise DirectiveError(
                "a plan without streams", expected="lines such as stream 0 row 0 compute compute: 0F0 0B0"
            )
        for what, found, count in self._references():
            if any(index >= count for index in found):
                raise DirectiveError(f"a plan names {what} {max(found)}", expected=f"one of {count}")
        parts = tuple((stage, kind, tuple(variants)) for (stage, kind), variants in self.parts.items())
        return assemble(self.base | {"parts": parts}, self.streams, self.waits)

    def _references(self) -> Iterable[tuple[str, list[int], int]]:
        """Yield (what, indices named, how many there are)."""
        lines, buckets, rows = self.base["lines"], self.base["buckets"], len(self.base["rows"])
        stages, actions = len(self.base["inputs"]), [action for _, actions in self.streams for action in actions]
        ends = [(line.source, line.destination) if isinstance(line, Channel) else line.rows for line in lines]
        yield "row", [stream.row for stream, _ in self.streams], rows
        yield "row", [row for end in ends for row in end], rows
        yield "stage", [use.stage for use in buckets] + [stage for stage, _ in self.parts], stages
        yield "stage", [stage for into in self.base["inputs"] for stage in into], stages
        yield "line", [action[5] for action in actions], len(lines)
        yield "bucket", [action[3] for action in actions], len(buckets)
        for positions in self.waits:
            waits = [wait for held in positions for wait in held]
            yield "stream", [stream for stream, _ in waits], len(self.streams)
            for stream, position in waits:
                yield f"in stream {stream} action", [position], len(self.streams[stream][1])
        for name, count in (("lanes", rows), ("repeated", stages)):
            if len(self.base.get(name, ())) not in (0, count):
                raise DirectiveError(f"{name} of a plan has the wrong length", expected=str(count))

    def _plan(self, line: str, word: str, rest: str) -> None:
        _, _, sync, _, microbatches = line.split()
        self.base |= {"sync": Sync(sync), "microbatches": int(microbatches)}

    def _line(self, line: str, word: str, rest: str) -> None:
        if match := _CHANNEL.fullmatch(line):
            made: Channel | Communicator = Channel(int(match[1]), int(match[2]), _unquote(match[3])[0])
        else:
            match = _match(_COMMUNICATOR, line)
            made = Communicator(_ints(match[1]), tuple(map(_ints, match[2].split("|"))), _unquote(match[3])[0])
        self.base["lines"] += (made,)

    def _bucket(self, line: str, word: str, rest: str) -> None:
        match = _match(_BUCKET, line)
        users = [tuple(self.label[name] for name in text.split() if text != "-") for text in match.groups()[3:]]
        use = BucketUse(int(match[1]), match[2] == "each use", Reduction(match[3]), *users)
        self.base["buckets"] += (use,)

    def _parts(self, line: str, word: str, rest: str) -> None:
        _, stage, kind = word.split()
        pieces = [_match(_PIECE, text) for text in rest.split()]
        variant = tuple(Part(self.label[p[2]], bool(p[3]), _ints(p[4]), bool(p[1]), bool(p[5])) for p in pieces)
        if any(read >= len(variant) for part in variant for read in part.reads):
            raise DirectiveError("a piece reads one that does not exist")
        self.parts.setdefault((int(stage), str(ActionKind(kind))), []).append(variant)

    def _stream(self, line: str, word: str, rest: str) -> None:
        match = _match(_STREAM, line)
        if int(match[1]) != len(self.streams):
            raise DirectiveError(f"stream {match[1]} is out of turn", expected=f"stream {len(self.streams)}")
        name, actions = _unquote(match[4])
        held: list[list[tuple[int, int]]] = []
        made: list[tuple[int, int, int, int, int, int]] = []
        for token in actions.split():
            part = _match(_TOKEN, token)
            action = Action.parse(part[1])
            label = self.label[action.region] if action.region else -1
            microbatch = -1 if action.microbatch is None else action.microbatch
            bucket = -1 if action.bucket is None else action.bucket
            made.append((CODE[action.kind], action.stage, microbatch, bucket, label, int(part[2] or -1)))
            pairs = [pair.split(".") for pair in (part[3] or "").split(",") if pair]
            held.append([(int(stream), int(position)) for stream, position in pairs])
        self.streams.append((Stream(int(match[2]), StreamKind[match[3].upper()], name), made))
        self.waits.append(held)


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match
