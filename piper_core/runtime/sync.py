"""What a rank does with its buckets: gather, reduce, tie, measure, update. One method for each kind of action."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from piper_core.runtime.buffers import Arena, Bucket, Run
from piper_core.runtime.communicator import Communicator, Group, Work
from piper_core.runtime.optimizer import Clip, Optimizer, Updater
from piper_core.runtime.storage import StageStorage

Finish = Callable[[], None]
IN_FLIGHT = 2
"""Reductions of single microbatches that may be under way before another one's gradient buffer is handed out."""


class Reducing:
    """A reduction of one microbatch under way: its parts go to the shards when it is over."""

    def __init__(self, parts: list[tuple[Run, Tensor, Tensor, Work]], arena: Arena) -> None:
        self._parts, self._arena = parts, arena

    def finish(self) -> None:
        """Wait, add up, give the buffers back; again: nothing."""
        for run, flat, shard, work in self._parts:
            work.wait()
            run.gradient.add_(shard)
            self._arena.give(flat)
        self._parts = []


class Sync:
    """The buckets of one rank and what they exchange; ``values`` are the microbatches' values, to which gathered
    parameters (``name@F`` and ``name@B``) and gradient buffers (``+name``) are added while they are there."""

    def __init__(
        self, communicator: Communicator, stages: Mapping[int, StageStorage], values: list[dict[str, Tensor]],
        tensor_group: Group | None, optimizer: Optimizer, clip: Clip | None,
    ) -> None:  # fmt: skip
        self.communicator, self.stages, self.values = communicator, stages, values
        self.tensor_group, self.clip = tensor_group, clip
        self.arena = Arena()
        self.buckets = {i: bucket for stage in stages.values() for i, bucket in stage.buckets.items()}
        self.summed = {name for stage in stages.values() for name in stage.summed}
        self.optimizers = {
            stage: Updater(optimizer, [run.master for run in each.runs])
            for stage, each in stages.items() if each.runs
        }  # fmt: skip
        self.norm = 0.0
        self._scale, self._completed = 1.0, False
        self._gathered: dict[tuple[int, int], deque[tuple[str, list[tuple[Run, Tensor, dict[str, Tensor]]]]]] = {}
        self._open: dict[tuple[int, int], list[tuple[Run, Tensor]]] = {}
        self._reducing: deque[Reducing] = deque()
        self._whole: set[int] = set()
        tied: dict[str, list[Run]] = {}
        for bucket in self.buckets.values():
            for run in bucket.runs:
                if run.tied:
                    tied.setdefault(run.slots[0].name, []).append(run)
        self.copies = [runs for runs in tied.values() if len(runs) > 1]

    def begin(self) -> None:
        """Clear the gradients for a step."""
        for bucket in self.buckets.values():
            for run in bucket.runs:
                (run.gradient if run.total is None else run.total).zero_()
        self._scale, self._completed = 1.0, False
        self._whole.clear()

    # --- parameters ---

    def gather_step(self, bucket: Bucket, group: Group) -> Finish:
        """Gather a bucket at the head of a step, in place."""
        works = [self.communicator.all_gather(run.flat, run.part, group) for run in bucket.runs if run.flat is not None]
        return lambda: _wait_all(works)

    def gather_each(self, bucket: Bucket, group: Group, microbatch: int, way: str) -> Finish:
        """Gather a bucket for one microbatch's forward (``way`` F) or backward (B)."""
        while len(self._reducing) >= (1 if way == "F" else IN_FLIGHT):  # what an earlier backward left, by now over
            self._reducing.popleft().finish()
        taken = [(run, *self.arena.take(run)) for run in bucket.runs]
        works = [self.communicator.all_gather(flat, run.part, group) for run, flat, _ in taken]
        self._gathered.setdefault((bucket.index, microbatch), deque()).append((way, taken))

        def finish() -> None:
            _wait_all(works)
            held = self.values[microbatch]
            for _, _, views in taken:
                held.update({f"{name}@{way}": view for name, view in views.items()})

        return finish

    def free(self, bucket: Bucket, microbatch: int) -> None:
        """Give back the oldest gathered copy of a microbatch."""
        way, taken = self._gathered[bucket.index, microbatch].popleft()
        held = self.values[microbatch]
        for _, flat, views in taken:
            for name in views:
                del held[f"{name}@{way}"]
            self.arena.give(flat)

    # --- gradients ---

    def open(self, bucket: Bucket, microbatch: int) -> None:
        """Provide buffers for the gradient of one microbatch, if they are not there yet."""
        key = (bucket.index, microbatch)
        if key in self._open:
            return
        while len(self._reducing) >= IN_FLIGHT:
            self._reducing.popleft().finish()
        taken = [(run, *self.arena.take(run, zero=True)) for run in bucket.runs]
        self._open[key] = [(run, flat) for run, flat, _ in taken]
        held = self.values[microbatch]
        for _, _, views in taken:
            held.update({f"+{name}": view for name, view in views.items()})

    def reduce_each(self, bucket: Bucket, group: Group, microbatch: int) -> Finish:
        """Reduce the gradient of one microbatch into the shard."""
        self.open(bucket, microbatch)  # where nothing has added to it, zeros
        taken, held = self._open.pop((bucket.index, microbatch)), self.values[microbatch]
        parts = []
        for run, flat in taken:
            for name in (each for slot in run.slots for each in slot.placeholders):
                del held[f"+{name}"]
            self._sum_parts(run, flat)
            shard = flat.new_empty(run.shard_numel)
            parts.append((run, flat, shard, self.communicator.reduce_scatter(shard, flat, group)))
        made = Reducing(parts, self.arena)
        self._reducing.append(made)
        return made.finish

    def reduce_step(self, bucket: Bucket, group: Group) -> Finish:
        """Reduce the gradient of the step."""
        works = []
        self._sum_whole(bucket)
        for run in bucket.runs:
            assert run.total is not None
            if run.zero == 0:
                works.append(self.communicator.all_reduce(run.total, group))
            else:
                works.append(self.communicator.reduce_scatter(run.gradient, run.total, group))
        return lambda: _wait_all(works)

    def tie(self, bucket: Bucket, group: Group) -> Finish:
        """Sum the gradient of a tied parameter over the rows that hold it: before the data reduction, or of the shard
        after that where it is a microbatch's."""
        (run,) = (each for each in bucket.runs if each.tied)
        if bucket.each:
            self._settle()
        return self.communicator.all_reduce(run.gradient if run.total is None else run.total, group).wait  # type: ignore[return-value]

    def _sum_whole(self, bucket: Bucket) -> None:
        """Sum the parts of gradients that tensor ranks have, once a step."""
        if bucket.index not in self._whole:
            self._whole.add(bucket.index)
            for run in bucket.runs:
                if run.total is not None:
                    self._sum_parts(run, run.total)

    def _sum_parts(self, run: Run, flat: Tensor) -> None:
        parts = [flat[s.start : s.start + s.numel] for s in run.slots if s.name in self.summed]
        if parts and self.tensor_group is not None:
            joined = torch.cat(parts)
            self.communicator.all_reduce(joined, self.tensor_group).wait()
            for part, total in zip(parts, joined.split_with_sizes([len(each) for each in parts]), strict=True):
                part.copy_(total)

    def _settle(self) -> None:
        while self._reducing:
            self._reducing.popleft().finish()

    def _complete(self) -> None:
        """Bring gradients to what they are when all reductions are over, copies on one rank included."""
        self._settle()
        for bucket in self.buckets.values():
            self._sum_whole(bucket)
        for first, *others in self.copies:  # on one row the plan has no collective for them
            for other in others:
                first.gradient += other.gradient
            for other in others:
                other.gradient.copy_(first.gradient)

    def norm_start(self, group: Group | None) -> Finish:
        """Measure the global norm."""
        self._complete()
        self._completed = True
        squares = [run.square() for bucket in self.buckets.values() for run in bucket.runs]
        total = torch.stack(squares).sum().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)
        work = None if group is None else self.communicator.all_reduce(total, group)

        def finish() -> None:
            if work is not None:
                work.wait()
            self.norm = float(total) ** 0.5
            self._scale = self.clip.scale(self.norm) if self.clip is not None else 1.0

        return finish

    def update(self, stage: int) -> None:
        """Let the optimizer update a stage."""
        if not self._completed:  # without a norm nothing has done it
            self._complete()
            self._completed = True
        runs = self.stages[stage].runs
        if not runs:
            return
        gradients = [run.gradient for run in runs]
        if self._scale != 1.0:
            torch._foreach_mul_(gradients, self._scale)
        self.optimizers[stage].update(gradients)
        for run in runs:
            run.updated()


def _wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()
