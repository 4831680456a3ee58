"""What the actions of a plan need: each once, on the right row, and what each of them reads.

The reference interpreter's own reading of a plan; it shares no code with the verifier.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from typing import Any

from piper_core.ir.action import ActionKind as K
from piper_core.names import Sync
from piper_core.schedule.plan import KINDS, Channel, Communicator, Part, Plan, Reduction, StreamKind

COMPUTE, INNER = (K.F, K.B, K.BI, K.BW, K.R), (K.ALL_TO_ALL_F, K.ALL_TO_ALL_B, K.COMM_F, K.COMM_B)
SEND, RECV = (K.SEND_F, K.SEND_B), (K.RECV_F, K.RECV_B)
GATHER, REDUCE = {K.ALL_GATHER_F: "F", K.ALL_GATHER_B: "B"}, (K.REDUCE_SCATTER, K.ALL_REDUCE)
MACRO = {K.F: (K.F,), K.B: (K.B, K.BI), K.BI: (K.B, K.BI)}


class Fault(Exception):  # noqa: N818 - not an error of the program's
    """Why a plan does not run."""


class Needs:
    """``by[row, kind]`` and ``macros[row, stage, kind, microbatch]`` find actions; ``mail`` holds the messages that
    have come to a row, ``held`` the buckets that are gathered there and not freed."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.kind, self.stage = plan, [KINDS[k] for k in plan.kind.tolist()], plan.stage.tolist()
        self.mb, self.label, self.bucket = plan.microbatch.tolist(), plan.label.tolist(), plan.bucket.tolist()
        self.line, self.stream, self.first = plan.line.tolist(), plan.stream_of().tolist(), plan.start.tolist()
        self.waits = [plan.waits[a:b].tolist() for a, b in pairwise(plan.wait_start.tolist())]
        self.row = [plan.streams[s].row for s in self.stream]
        self.mail: dict[tuple[int, str, int, int], list[tuple[int, int]]] = defaultdict(list)
        self.held: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)  # gathered, and not freed
        self.by: dict[tuple[int, K], list[int]] = defaultdict(list)
        self.macros: dict[tuple[int, int, K, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(self.kind):
            self.by[self.row[i], kind].append(i)
            if kind in COMPUTE:
                self.macros[self.row[i], self.stage[i], kind, self.mb[i]].append(i)
        self.part: dict[int, tuple[Part, list[int], K]] = {}
        self.output: dict[tuple[int, int, K, int], list[int]] = {}
        for key in self.macros:
            self.open(*key)
        self.hosted = {(row, stage, mb) for row, stage, kind, mb in self.macros if kind is K.F}
        self.well_formed()

    def demand(self, holds: object, i: int, what: str) -> None:
        if not holds:
            raise Fault(f"{self.plan.action(i)}: {what}" if i >= 0 else what)

    def find(self, row: int, *kinds: K, **wanted: Any) -> list[int]:
        found = [i for kind in kinds for i in self.by.get((row, kind), ())]
        return [i for i in found if all(getattr(self, name)[i] == value for name, value in wanted.items())]

    def open(self, row: int, stage: int, kind: K, mb: int) -> None:
        """Find out how a macro is cut: of the ways that fit, the one with most of its collectives apart."""
        found = self.macros[row, stage, kind, mb]
        inner = {self.label[i]: i for i in self.find(row, *INNER, stage=stage, mb=mb)}
        ways = [v for s, k, variants in self.plan.parts if (s, k) == (stage, kind.value) for v in variants]
        ways = [v for v in ways if [p.label for p in v if not p.inner] == [self.label[i] for i in found]]
        ways = [v for v in ways if all(p.label in inner for p in v if p.inner)]
        whole = (Part(-1, False, (), True, True),) if [self.label[i] for i in found] == [-1] else None
        cut = whole or max(ways, key=lambda v: sum(p.inner for p in v), default=())
        self.demand(cut, found[0], "pieces that make no whole")
        computes = iter(found)
        members = [inner[p.label] if p.inner else next(computes) for p in cut]
        self.output[row, stage, kind, mb] = [found[-1], *(i for i, p in zip(members, cut, strict=True) if p.gives)]
        for i, p in zip(members, cut, strict=True):
            self.demand(i not in self.part, i, "in two macros")
            self.part[i] = p, [members[j] for j in p.reads], kind

    def well_formed(self) -> None:
        """Every action is on a stream and a line where it can be; what the step needs is there, once."""
        plan, queue, lanes = self.plan, dict[Any, int](), self.plan.lanes or (0,) * len(self.plan.rows)
        for i, kind in enumerate(self.kind):
            line, message = plan.lines[self.line[i]] if self.line[i] >= 0 else None, kind in SEND + RECV
            if kind in (*COMPUTE, K.FREE, K.UPDATE):
                self.demand(plan.streams[self.stream[i]].kind is StreamKind.COMPUTE, i, "not on a compute stream")
            self.demand(kind not in INNER or i in self.part, i, "in no macro")
            self.demand(isinstance(line, Channel) == message, i, "on a wrong line")
            if line:
                ends = line.rows if isinstance(line, Communicator) else (line.destination, line.source)
                mine = (ends[kind in SEND],) if message else ends
                self.demand(self.row[i] in mine, i, "at a wrong end")
                at = self.line[i], self.row[i], kind in SEND
                self.demand(queue.setdefault(at, self.stream[i]) == self.stream[i], i, "a line on two streams")
        homes = [(lanes[row], stage, mb) for row, stage, mb in self.hosted]
        every = product(sorted(set(lanes)), range(plan.stages), range(plan.microbatches))
        self.demand(sorted(homes) == list(every), -1, "a forward too few or too many")
        for row, stage, kind, mb in self.macros:
            self.demand((row, stage, mb) in self.hosted, self.macros[row, stage, kind, mb][0], "without its forward")
        for row, stage, mb in self.hosted:
            has = {kind for kind in COMPUTE if (row, stage, kind, mb) in self.macros} - {K.F}
            again = {K.R} if plan.repeated and mb in plan.repeated[stage] else set()
            self.demand(has - {K.R} in ({K.B}, {K.BI, K.BW}), -1, f"backward of {stage} {mb}")
            self.demand(has & {K.R} == again, -1, f"recompute of {stage} {mb}")
        for row in range(len(plan.rows)):
            stages = {s for r, s, _ in self.hosted if r == row}
            self.demand(sorted(self.stage[i] for i in self.find(row, K.UPDATE)) == sorted(stages), -1, "updates")
            norms = len(self.find(row, K.NORM))
            self.demand(norms == 1 or (plan.sync is Sync.NONE and not norms) or not stages, -1, "norms")
            due = []
            for b, use in enumerate(plan.buckets):
                mbs = sorted(mb for r, s, mb in self.hosted if (r, s) == (row, use.stage))
                due += [(b, mb) for mb in mbs if use.reduction is Reduction.EACH]
                due += [(b, -1)] if mbs and use.reduction is Reduction.STEP else []
            done = sorted((self.bucket[i], self.mb[i]) for i in self.find(row, *REDUCE) if not self.tie(i))
            self.demand(done == due, -1, f"reductions of row {row}")
            gathers = [(self.kind[i], self.bucket[i], self.mb[i]) for i in self.find(row, K.ALL_GATHER, *GATHER)]
            self.demand(len(set(gathers)) == len(gathers), -1, f"a bucket of row {row} is gathered twice for one use")

    def tie(self, i: int) -> bool:
        line = self.plan.lines[self.line[i]]
        return isinstance(line, Communicator) and line.label == "tie"

    def done(self, row: int, stage: int, mb: int, *kinds: K) -> list[int]:
        return [i for kind in kinds for i in self.macros.get((row, stage, kind, mb), ())]

    def incoming(self, row: int, stage: int, kind: K, mb: int, i: int) -> list[int]:
        """Return what comes into a macro from others, and from other rows."""
        if kind in (K.BW, K.R):
            return self.done(row, stage, mb, K.BI) if kind is K.BW else []
        forward, inputs = kind is K.F, self.plan.inputs
        near = inputs[stage] if forward else [t for t, into in enumerate(inputs) if stage in into]
        need: list[int] = []
        for s in near:
            need += [p for k in MACRO[kind] for p in self.output.get((row, s, k, mb), ())]
        mail = self.mail[row, "F" if forward else "B", stage, mb]
        far = sorted(s for s in near if (row, s, mb) not in self.hosted)
        self.demand(sorted(source for _, source in mail) == far, i, f"lacks a message, or has one too many, of {far}")
        return need + [p for p, _ in mail]

    def reads(self, i: int) -> list[int]:
        kind, stage, mb, bucket, row = self.kind[i], self.stage[i], self.mb[i], self.bucket[i], self.row[i]
        if i in self.part:
            part, need, macro = self.part[i]
            need = need + (self.incoming(row, stage, macro, mb, i) if part.takes else [])
            need += self.done(row, stage, mb, K.F) if macro is not K.F else []
            need += self.done(row, stage, mb, K.R) if kind in (K.B, K.BI) else []
            return need if part.inner else need + self.parameters(i, "B" if macro is not K.F else "F")
        if kind in SEND:
            need = [
                p for k in MACRO[K.F if kind is K.SEND_F else K.B] for p in self.output.get((row, stage, k, mb), ())
            ]
            self.demand(need, i, "sends what is not made here")
            return need
        weights = self.find(row, K.B, K.BW)
        if kind in REDUCE:
            use, tied = self.plan.buckets[bucket], [p for p in self.find(row, *REDUCE, bucket=bucket) if self.tie(p)]
            if self.tie(i) and use.reduction is Reduction.EACH:
                return [p for p in self.find(row, *REDUCE, bucket=bucket) if p not in tied]
            mine = [
                p
                for p in weights
                if self.stage[p] == use.stage and self.label[p] in use.weight and mb in (-1, self.mb[p])
            ]
            return mine if self.tie(i) or use.reduction is Reduction.EACH else mine + tied
        if kind is K.NORM:
            return weights + self.find(row, *REDUCE)
        if kind is K.UPDATE:
            sums = [p for p in self.find(row, *REDUCE) if self.plan.buckets[self.bucket[p]].stage == stage]
            norm = self.find(row, K.NORM) if self.plan.sync is Sync.GLOBAL_NORM else []
            return [p for p in weights if self.stage[p] == stage] + sums + norm
        if kind is K.FREE:
            held = [buffer for buffer in self.held[row, bucket] if buffer[1] == mb]
            self.demand(held, i, "frees what is not gathered")
            self.held[row, bucket].remove(held[0])
            return [held[0][2]]
        return []

    def parameters(self, i: int, way: str) -> list[int]:
        """Return the gathers of what a compute piece uses, which must still be held."""
        row, kind, label, need = self.row[i], self.kind[i], self.label[i], list[int]()
        for b, use in enumerate(self.plan.buckets):
            labels = {K.F: use.forward, K.B: use.backward, K.BI: use.backward, K.R: use.again}.get(kind, ())
            if use.stage != self.stage[i] or label not in labels:
                continue
            held = [g for w, mb, g in self.held[row, b] if (w, mb) == (way, self.mb[i])]
            found = held if use.each_use else self.find(row, K.ALL_GATHER, bucket=b, mb=-1) if kind is K.F else [i - 1]
            self.demand(found, i, f"bucket {b} is not gathered, or was freed")
            need += found if use.each_use or kind is K.F else []
        return need
