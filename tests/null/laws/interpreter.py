"""A reference interpreter of plans: it runs one, stream by stream, and watches what every action reads.

It shares no code with the verifier, which runs nothing. Streams are queues; an action starts when it is at the head
of its stream and its waits have ended; a message or a collective ends when all its ends have started. One vector
clock an action says what must have ended before it starts: what it reads must, in every execution, not only in this.
"""

from __future__ import annotations

from piper_core.ir.action import ActionKind as K
from piper_core.schedule.plan import Channel, Plan
from tests.null.laws.needs import GATHER, RECV, REDUCE, SEND, Fault, Needs


def fault(plan: Plan) -> str | None:
    """Return why a plan does not run, None if it does."""
    try:
        Machine(plan).run()
    except Fault as error:
        return str(error)
    return None


class Machine(Needs):
    """``clock[i]`` says, for each stream, how many of its actions have ended when action i has (empty before)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.clock: list[list[int]] = [[]] * len(plan)

    def run(self) -> None:
        head = list(self.first[:-1])
        while ready := [
            i for s, i in enumerate(head) if i < self.first[s + 1] and all(self.clock[w] for w in self.waits[i])
        ]:
            moved = False
            for i in ready:
                ends = self.ends(i, ready)
                if ends and not self.clock[i]:
                    moved = True
                    starts = [self.begin(j) for j in ends]
                    clock = [max(column) for column in zip(*starts, strict=True)]
                    self.meet(ends)
                    for j in ends:
                        s = self.stream[j]
                        head[s], clock[s] = j + 1, j + 1 - self.first[s]
                        self.clock[j] = clock
            self.demand(moved, ready[0], "deadlock")
        self.demand(head == self.first[1:], -1, "deadlock")
        self.demand(not any(self.held.values()), -1, "leak")

    def ends(self, i: int, ready: list[int]) -> list[int]:
        """Return the actions that end together with a ready one, none if some are not ready."""
        if self.line[i] < 0:
            return [i]
        line = self.plan.lines[self.line[i]]
        found = [j for j in ready if self.line[j] == self.line[i]]
        rows = [line.source, line.destination] if isinstance(line, Channel) else [*line.rows]
        return found if sorted(self.row[j] for j in found) == sorted(rows) else []

    def begin(self, i: int) -> list[int]:
        before = [*self.waits[i], *([i - 1] if i > self.first[self.stream[i]] else [])]
        none = [0] * len(self.plan.streams)
        clock = [max(column) for column in zip(none, *(self.clock[j] for j in before), strict=True)]
        for p in self.reads(i):
            s = self.stream[p]
            self.demand(p - self.first[s] < clock[s], i, f"does not wait for {self.plan.action(p)}")
        return clock

    def meet(self, ends: list[int]) -> None:
        """Hand over what a message carries; compare what the members of a collective do."""
        a, b = min(ends, key=lambda i: self.kind[i] in RECV), max(ends, key=lambda i: self.kind[i] in RECV)
        if self.kind[a] in SEND:
            way = self.kind[a].value[-1]
            source, target = (self.stage[a], self.stage[b]) if way == "F" else (self.stage[b], self.stage[a])
            fits = way == self.kind[b].value[-1] and self.mb[a] == self.mb[b] and 0 <= target < self.plan.stages
            self.demand(fits and source in self.plan.inputs[target], b, f"mispaired with {self.plan.action(a)}")
            self.mail[self.row[b], way, self.stage[b], self.mb[b]].append((b, self.stage[a]))
            return
        loose = self.kind[a] is K.NORM or (self.kind[a] in REDUCE and self.tie(a))
        same = {(self.kind[i], self.mb[i], -1 if loose else self.bucket[i]) for i in ends}
        self.demand(len(same) == 1, a, "meets another collective")
        if self.kind[a] in GATHER:
            for i in ends:
                self.held[self.row[i], self.bucket[i]].append((GATHER[self.kind[i]], self.mb[i], i))
