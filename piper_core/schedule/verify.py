"""Prove that a plan runs: no deadlock, right messages, right data, every buffer in time. Nothing is simulated."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from piper_core.errors import PlanError
from piper_core.ir.action import ActionKind
from piper_core.ir.macro import cycle, topological
from piper_core.names import Sync
from piper_core.schedule.plan import CODE, KINDS, Channel, Plan, StreamKind

_F, _B, _BI, _BW, _R = (CODE[ActionKind(word)] for word in ("F", "B", "BI", "BW", "R"))
_SENDS = {CODE[ActionKind.SEND_F]: True, CODE[ActionKind.SEND_B]: False}
_RECVS = {CODE[ActionKind.RECV_F]: True, CODE[ActionKind.RECV_B]: False}
_GATHERS = {
    CODE[ActionKind.ALL_GATHER]: None,
    CODE[ActionKind.ALL_GATHER_F]: True,
    CODE[ActionKind.ALL_GATHER_B]: False,
}
_REDUCES = (CODE[ActionKind.REDUCE_SCATTER], CODE[ActionKind.ALL_REDUCE])
_INNER = {CODE[ActionKind(word)] for word in ("ALL_TO_ALL_F", "ALL_TO_ALL_B", "COMM_F", "COMM_B")}
_UPDATE, _NORM, _FREE = CODE[ActionKind.UPDATE], CODE[ActionKind.NORM], CODE[ActionKind.FREE]


def verify(plan: Plan) -> None:
    """Check a plan under rendezvous rules, without assuming any buffering.

    A message completes when both ends are at the head of their streams, a collective when all its rows are; an
    action holds its own stream and no other. Proved: every (stage, microbatch) has F once and exactly one of B or
    BI and BW; the k-th send of each channel meets the k-th receive that wants it; members of a communicator agree in
    order; what an action reads has happened before it by waits and stream order alone; gathered buckets are
    freed after their last use and not used later; and no cycle of waiting exists.

    Raises:
        PlanError: with a stable ``reason``, a one-line text and at most ten lines of the grid.
    """
    _Verifier(plan).run()


class _Verifier:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kind, self.stage = plan.kind.tolist(), plan.stage.tolist()
        self.microbatch, self.bucket = plan.microbatch.tolist(), plan.bucket.tolist()
        self.label, self.line = plan.label.tolist(), plan.line.tolist()
        self.stream = plan.stream_of().tolist()
        self.start = plan.start.tolist()
        self.row_of_stream = [stream.row for stream in plan.streams]
        self.row = [self.row_of_stream[s] for s in self.stream]
        self.lane = [plan.lanes[row] for row in self.row] if plan.lanes else [0] * len(self.row)
        wait_start, waits = plan.wait_start.tolist(), plan.waits.tolist()
        self.waits = [waits[a:b] for a, b in pairwise(wait_start)]
        self.outputs: list[list[int]] = [[] for _ in plan.inputs]
        for stage, before in enumerate(plan.inputs):
            for source in before:
                self.outputs[source].append(stage)

    def run(self) -> None:
        """Run every check; the first failure is raised."""
        self._complete()
        partner = self._pair()
        self._dependencies()
        self._buffers()
        self._deadlock(partner)

    # completeness ------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Each (stage, microbatch): F once, and B or BI and BW, once, on the same row; macro actions whole."""
        plan = self.plan
        parts: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(lambda: {(-1,)})
        for stage, verb, sets in plan.parts:
            parts[stage, CODE[ActionKind(verb)]] = {(-1,), *sets}
        self.at: dict[tuple[int, int, int, int], list[int]] = {}
        for s, stream in enumerate(plan.streams):
            if stream.kind is StreamKind.COMPUTE:
                for i in range(self.start[s], self.start[s + 1]):
                    if self.kind[i] in (_F, _B, _BI, _BW, _R):
                        key = (self.lane[i], self.stage[i], self.kind[i], self.microbatch[i])
                        self.at.setdefault(key, []).append(i)
        for (_, stage, kind, microbatch), found in self.at.items():
            if stage >= plan.stages or not 0 <= microbatch < plan.microbatches:
                raise self._error(
                    "incomplete", f"{self._name(found[0])} is of no stage or microbatch of the plan", found
                )
            labels = tuple([self.label[i] for i in found])
            if labels not in parts[stage, kind]:
                twice = len(set(labels)) < len(labels)
                what = "runs more than once" if twice else "does not run all its parts in order"
                raise self._error(
                    "duplicate" if twice else "incomplete", f"{self._word(stage, kind, microbatch)} {what}", found
                )
        for lane in sorted(set(plan.lanes) or {0}):
            for stage in range(plan.stages):
                for microbatch in range(plan.microbatches):
                    self._once(lane, stage, microbatch)

    def _once(self, lane: int, stage: int, microbatch: int) -> None:
        """Refuse a (stage, microbatch) without F, or with other than one of B and {BI, BW}, or on two rows."""
        found = {
            k: self.at[lane, stage, k, microbatch]
            for k in (_F, _B, _BI, _BW)
            if (lane, stage, k, microbatch) in self.at
        }
        if _F not in found:
            raise self._error("incomplete", f"{stage}F{microbatch} is missing")
        has = [k for k in found if k != _F]
        if has not in ([_B], [_BI, _BW]):
            if _B in has:
                what = f"stage {stage} microbatch {microbatch} has both B and {KINDS[has[1]].value}"
                raise self._error("duplicate", what, found[has[1]])
            lacks = "B" if not has else "BW" if has == [_BI] else "BI"
            raise self._error("incomplete", f"{stage}{lacks}{microbatch} is missing")
        for k in has:
            if self.row[found[k][0]] != self.row[found[_F][0]]:
                what = f"{self._word(stage, k, microbatch)} is on another row than {stage}F{microbatch}"
                raise self._error("data_dependency", what, found[k])

    # pairing -------------------------------------------------------------------------------------------------------

    def _pair(self) -> list[int]:
        """Return, for each action, the first of those that it meets (itself when alone).

        Pairs are found as the runtime finds them: by position on the channel or communicator, not by name.
        """
        plan = self.plan
        queues: list[dict[tuple[int, bool], list[int]]] = [{} for _ in plan.lines]
        owner: dict[tuple[int, int, bool], int] = {}
        for i, line in enumerate(self.line):
            if line < 0:
                if self.kind[i] in _SENDS or self.kind[i] in _RECVS:
                    raise self._error("mispaired", f"{self._name(i)} is on no channel", [i])
                continue
            sending = self.kind[i] in _SENDS
            if owner.setdefault((line, self.row[i], sending), self.stream[i]) != self.stream[i]:
                raise self._error(
                    "mispaired", f"{self._name(i)} uses a channel that another stream of its row uses", [i]
                )
            queues[line].setdefault((self.row[i], sending), []).append(i)
        partner = list(range(len(plan)))
        for line, queue in zip(plan.lines, queues, strict=True):
            if isinstance(line, Channel):
                sends, recvs = queue.get((line.source, True), []), queue.get((line.destination, False), [])
                if sum(map(len, queue.values())) != len(sends) + len(recvs):
                    stray = next(
                        i
                        for (row, sending), q in queue.items()
                        for i in q
                        if row != (line.source if sending else line.destination)
                    )
                    raise self._error("mispaired", f"{self._name(stray)} is at the wrong end of its channel", [stray])
                self._messages(line, sends, recvs, partner)
            else:
                self._collectives(line.rows, [queue.get((row, False), []) for row in line.rows], line.label, partner)
        return partner

    def _messages(self, line: Channel, sends: list[int], recvs: list[int], partner: list[int]) -> None:
        for a, b in zip(sends, recvs, strict=False):
            forward = _SENDS[self.kind[a]]
            source, target = (self.stage[a], self.stage[b]) if forward else (self.stage[b], self.stage[a])
            if (
                forward != _RECVS[self.kind[b]]
                or self.microbatch[a] != self.microbatch[b]
                or target >= self.plan.stages
                or source not in self.plan.inputs[target]
            ):
                raise self._error(
                    "mispaired",
                    f"row {line.destination} expects {self._name(b)} but the next message from "
                    f"row {line.source} is {self._name(a)}",
                    [b, a],
                )
            partner[b] = a
        if len(sends) != len(recvs):
            lone = (sends + recvs)[len(sends) + len(recvs) - 1] if len(sends) < len(recvs) else sends[len(recvs)]
            raise self._error(
                "mispaired",
                f"{self._name(lone)} on row {self.row[lone]} has no partner on row "
                f"{line.source if len(sends) < len(recvs) else line.destination}",
                [lone],
            )

    def _collectives(self, rows: tuple[int, ...], queues: list[list[int]], label: str, partner: list[int]) -> None:
        first = queues[0]
        for row, queue in zip(rows[1:], queues[1:], strict=True):
            for a, b in zip(first, queue, strict=False):
                same = (self.kind[a], self.microbatch[a]) == (self.kind[b], self.microbatch[b])
                if not same or (label not in ("tie", "norm") and self.bucket[a] != self.bucket[b]):
                    raise self._error(
                        "collective_order",
                        f"rows {rows[0]} and {row} meet in different collectives: {self._name(a)} and {self._name(b)}",
                        [a, b],
                    )
                partner[b] = a
            if len(first) != len(queue):
                longer = first if len(first) > len(queue) else queue
                lone = longer[min(len(first), len(queue))]
                raise self._error(
                    "collective_order",
                    f"{self._name(lone)} on row {self.row[lone]} lacks a member of its "
                    f"group (rows {', '.join(map(str, rows[:6]))})",
                    [lone],
                )

    # data ----------------------------------------------------------------------------------------------------------

    def _dependencies(self) -> None:
        """What each action reads happens before it: earlier on its stream, or waited for, by it or earlier there."""
        recv: dict[tuple[int, bool, int, int], list[int]] = {}
        gather: dict[tuple[int, bool | None, int, int], int] = {}
        reduces: dict[tuple[int, int], list[int]] = {}
        norm: dict[int, int] = {}
        for i, kind in enumerate(self.kind):
            if kind in _RECVS:
                recv.setdefault((self.row[i], _RECVS[kind], self.stage[i], self.microbatch[i]), []).append(i)
            elif kind in _GATHERS:
                gather[self.row[i], _GATHERS[kind], self.bucket[i], self.microbatch[i]] = i
            elif kind in _REDUCES:
                reduces.setdefault((self.row[i], self.stage[i]), []).append(i)
            elif kind == _NORM:
                norm[self.row[i]] = i
        self.gather, self.recv, self.reduces, self.norm = gather, recv, reduces, norm
        self.users: list[tuple[dict[int, list[int]], dict[int, list[int]]]] = [({}, {}) for _ in self.plan.inputs]
        self.heads: list[dict[int, list[int]]] = [{} for _ in self.plan.inputs]
        for b, use in enumerate(self.plan.buckets):
            for label in use.forward:
                target = self.users[use.stage][0] if use.each_use else self.heads[use.stage]
                target.setdefault(label, []).append(b)
            for label in use.backward:
                self.users[use.stage][1].setdefault(label, []).append(b)
        for s in range(len(self.plan.streams)):
            known: dict[int, int] = {}
            for i in range(self.start[s], self.start[s + 1]):
                pending = self.waits[i]
                while pending:  # what a collective inside an opened macro waited for has happened too
                    deeper: list[int] = []
                    for w in pending:
                        t = self.stream[w]
                        if known.get(t, -1) < w:
                            known[t] = w
                            if self.kind[w] in _INNER:
                                deeper += self.waits[w]
                    pending = deeper
                for p in self._reads(i):
                    t = self.stream[p]
                    if (p >= i) if t == s else (known.get(t, -1) < p):
                        raise self._error(
                            "data_dependency",
                            f"{self._name(i)} on row {self.row[i]} does not wait for {self._name(p)}",
                            [i, p],
                        )

    def _local(self, i: int, stage: int, kinds: tuple[int, ...], microbatch: int) -> list[int]:
        """Return the last part of (stage, one of kinds, microbatch) when it is on the row of action i."""
        for kind in kinds:
            found = self.at.get((self.lane[i], stage, kind, microbatch))
            if found:
                return [found[-1]] if self.row[found[-1]] == self.row[i] else []
        return []

    def _reads(self, i: int) -> list[int]:
        """Return the actions of its row whose results action i reads."""
        kind, stage, mb, row = self.kind[i], self.stage[i], self.microbatch[i], self.row[i]
        need: list[int] = []
        if kind in (_F, _B, _BI):
            forward = kind == _F
            if not forward:
                need += self._local(i, stage, (_F,), mb)
            if not forward and (self.lane[i], stage, _R, mb) in self.at:
                need += self._local(i, stage, (_R,), mb)
            remote = False
            for other in self.plan.inputs[stage] if forward else self.outputs[stage]:
                local = self._local(i, other, (_F,) if forward else (_B, _BI), mb)
                need += local
                remote = remote or not local
            if remote:
                messages = self.recv.get((row, forward, stage, mb))
                if not messages:
                    raise self._error(
                        "data_dependency", f"{self._name(i)} on row {row} has no message to read from", [i]
                    )
                need += messages
            for b in self.users[stage][0 if forward else 1].get(self.label[i], ()):
                g = self.gather.get((row, forward, b, mb))
                if g is None:
                    raise self._error(
                        "data_dependency",
                        f"{self._name(i)} on row {row} reads bucket {b}, which is not gathered for it",
                        [i],
                    )
                need.append(g)
            if forward:
                need += [
                    self.gather[at]
                    for b in self.heads[stage].get(self.label[i], ())
                    if (at := (row, None, b, -1)) in self.gather
                ]
        elif kind == _BW:
            need += self._local(i, stage, (_BI,), mb)
        elif kind == _R:
            need += self._local(i, stage, (_F,), mb)
        elif kind in _SENDS:
            made = self._local(i, stage, (_F,) if _SENDS[kind] else (_B, _BI), mb)
            if not made:
                raise self._error(
                    "data_dependency", f"{self._name(i)} on row {row} sends what its row never makes", [i]
                )
            need += made
        elif kind in _REDUCES:
            need += self._gradients(i)
        elif kind == _UPDATE:
            need += [p for m in range(self.plan.microbatches) for p in self._local(i, stage, (_B, _BW), m)]
            need += self.reduces.get((row, stage), [])
            if self.plan.sync is Sync.GLOBAL_NORM:
                if row not in self.norm:
                    raise self._error("data_dependency", f"{self._name(i)} on row {row} has no NORM to wait for", [i])
                need.append(self.norm[row])
        elif kind == _NORM:
            need += [r for stage_ in range(self.plan.stages) for r in self.reduces.get((row, stage_), [])]
        return need

    def _gradients(self, i: int) -> list[int]:
        """Return the weight gradients that a reduction sums: of one microbatch, or of all."""
        bucket = self.bucket[i]
        if not 0 <= bucket < len(self.plan.buckets):
            raise self._error("data_dependency", f"{self._name(i)} is of no bucket", [i])
        use, mb = self.plan.buckets[bucket], self.microbatch[i]
        need: list[int] = []
        for m in range(self.plan.microbatches) if mb < 0 else (mb,):
            for kind in (_B, _BW):
                found = self.at.get((self.lane[i], use.stage, kind, m), [])
                need += [p for p in found if self.row[p] == self.row[i] and self.label[p] in use.weight]
        return need

    # buffers -------------------------------------------------------------------------------------------------------

    def _buffers(self) -> None:
        """A gathered bucket is used after its gather and before its free, in the order of its gathers."""
        turn: dict[tuple[int, int], dict[tuple[bool, int], int]] = {}
        for i, kind in enumerate(self.kind):
            if _GATHERS.get(kind) is not None:
                order = turn.setdefault((self.row[i], self.bucket[i]), {})
                order[_GATHERS[kind] is True, self.microbatch[i]] = len(order)
        if not turn and _FREE not in self.kind:
            return
        for s, stream in enumerate(self.plan.streams):
            if stream.kind is not StreamKind.COMPUTE:
                continue
            freed: dict[int, int] = defaultdict(int)
            for i in range(self.start[s], self.start[s + 1]):
                kind = self.kind[i]
                if kind == _FREE:
                    freed[self.bucket[i]] += 1
                    if freed[self.bucket[i]] > len(turn.get((stream.row, self.bucket[i]), ())):
                        raise self._error(
                            "use_after_free",
                            f"row {stream.row} frees bucket {self.bucket[i]} more often than it gathers it",
                            [i],
                        )
                elif kind in (_F, _B, _BI):
                    for b in self.users[self.stage[i]][0 if kind == _F else 1].get(self.label[i], ()):
                        order = turn.get((stream.row, b), {})
                        if order.get((kind == _F, self.microbatch[i]), -1) < freed[b]:
                            raise self._error(
                                "use_after_free",
                                f"{self._name(i)} on row {stream.row} uses bucket {b} after it was freed",
                                [i],
                            )
            for (row, b), order in turn.items():
                if row == stream.row and freed[b] != len(order):
                    raise self._error(
                        "leak", f"row {row} gathers bucket {b} {len(order)} times and frees it {freed[b]} times"
                    )

    # deadlock ------------------------------------------------------------------------------------------------------

    def _deadlock(self, partner: list[int]) -> None:
        """With partners merged, stream order and waits must have no cycle: then, and only then, all can run."""
        plan = self.plan
        n = len(plan)
        first = np.asarray(partner, np.int32)
        inner = np.ones(n, np.bool_)
        inner[plan.start[:-1][plan.start[:-1] < n]] = False
        later = np.flatnonzero(inner)
        src = np.concatenate([later - 1, plan.waits])
        dst = np.concatenate([later, np.repeat(np.arange(n), np.diff(plan.wait_start))])
        src, dst = first[src], first[dst]
        _, stuck = topological(n, src, dst)
        if not stuck:
            return
        path = cycle(stuck, src, dst)
        members: dict[int, list[int]] = defaultdict(list)
        for i, p in enumerate(partner):
            members[p].append(i)
        rows = sorted({self.row[i] for t in path for i in members[t]})
        shown = [i for t in path for i in members[t][:1]]
        words = [f"{self._name(i)} (row {self.row[i]})" for i in shown]
        text = " then ".join(words[:6]) + (" then ..." if len(words) > 6 else f" then {words[0]}")
        who = (
            f"rows {' and '.join(map(str, rows))} wait for each other"
            if 1 < len(rows) <= 4
            else (
                f"{len(rows)} rows wait for each other in a ring"
                if len(rows) > 4
                else f"row {rows[0]} waits for itself"
            )
        )
        raise self._error("deadlock", f"{who}: {text}", shown)

    # messages ------------------------------------------------------------------------------------------------------

    def _name(self, i: int) -> str:
        return str(self.plan.action(i))

    @staticmethod
    def _word(stage: int, kind: int, microbatch: int) -> str:
        return f"{stage}{KINDS[kind].value}{microbatch}"

    def _error(self, reason: str, what: str, at: list[int] | None = None) -> PlanError:
        return PlanError(reason, what, context=context(self.plan, at or []))


def context(plan: Plan, at: list[int], lines: int = 10, around: int = 5) -> str:
    """Return at most ``lines`` lines of the grid: the compute (or the stream) around the given actions, marked."""
    shown: list[str] = []
    stream_of = plan.stream_of()
    for i in dict.fromkeys(at):
        s = int(stream_of[i])
        low = max(int(plan.start[s]), i - around)
        high = min(int(plan.start[s + 1]), i + around + 1)
        words = [f"[{plan.action(k)}]" if k == i else str(plan.action(k)) for k in range(low, high)]
        head = "... " if low > plan.start[s] else ""
        tail = " ..." if high < plan.start[s + 1] else ""
        stream = plan.streams[s]
        shown.append(f"row {stream.row} {stream.name}: {head}{' '.join(words)}{tail}  <-- here")
    return "\n".join(shown[:lines])
