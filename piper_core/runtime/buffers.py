"""Flat buckets: parameters, gradients and shards of every ZeRO stage, as views of few tensors.

A bucket is one flat tensor, which collectives take as it is; parameters are views of it. Ranks of its group hold equal
shards: shard k is the k-th part of the flat tensor. A tied parameter has a run of its own inside its bucket, so that
its copies on other stages fall into the same shards.

=====  ===========================  ===========================  =============================
ZeRO   parameters                   gradients                    what the optimizer updates
=====  ===========================  ===========================  =============================
0      whole                        whole                        whole
1      whole                        whole, reduced into a shard  a shard
2      whole                        a shard, beside one whole    a shard
                                    for each microbatch under way
3      a shard; whole while used    as 2                         a shard
=====  ===========================  ===========================  =============================

Gradients add up in fp32 (fp64 in an fp64 model); a microbatch's own, of ZeRO-2 and 3, is in the model's dtype. Where
that is narrower than fp32 the optimizer updates fp32 copies (master weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGN = 16
"""Elements: parameters begin at multiples of it, for the kernels' sake."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in a run: its placeholders in the graphs (a tied one has several), its name in the model, its
    shape, where it begins."""

    placeholders: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Run:
    """A flat tensor of parameters that are reduced, gathered and updated together: a bucket, or part of one.

    ``ranks`` is the group that holds it, ``index`` this rank's place there; ``zero`` its ZeRO stage (0 for a group of
    one); ``tied`` says that its one parameter has copies elsewhere. ``counted`` is, by name, the part of the squares
    of a gradient that this rank adds to the global norm (default: all), so that each parameter is counted once.
    """

    def __init__(
        self, values: Sequence[tuple[tuple[str, ...], str, Tensor]], ranks: tuple[int, ...], index: int, zero: int,
        *, tied: bool = False, counted: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.index, self.zero, self.tied = ranks, index, zero, tied
        slots, start = [], 0
        for placeholders, name, value in values:
            slots.append(Slot(placeholders, name, tuple(value.shape), start))
            start += -(-value.numel() // ALIGN) * ALIGN
        self.slots = tuple(slots)
        self.shard_numel = -(-start // (len(ranks) * ALIGN)) * ALIGN
        self.numel = self.shard_numel * len(ranks)
        first = values[0][2]
        self.dtype, self.device = first.dtype, first.device
        high = torch.float64 if self.dtype == torch.float64 else torch.float32
        low, up = self.bounds
        flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for slot, (_, _, value) in zip(self.slots, values, strict=True):
            flat[slot.start : slot.start + slot.numel] = value.reshape(-1)
        self.flat = flat if zero < 3 else None
        self.part = flat[low:up] if zero < 3 else flat[low:up].clone()
        held = flat if zero == 0 else self.part
        self.master = held if high == self.dtype else held.to(high)
        self.total = torch.zeros(self.numel, dtype=high, device=self.device) if zero < 2 else None
        self.gradient = self.total if self.total is not None and not zero else self.master.new_zeros(self.shard_numel)
        self._counted = self._norm_parts(counted or {})

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's shard begins and ends."""
        return self.index * self.shard_numel, (self.index + 1) * self.shard_numel

    @property
    def flat_nbytes(self) -> int:
        """Bytes of it when whole, in the model's dtype."""
        return self.numel * self.dtype.itemsize

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters' places in a flat tensor, by placeholder."""
        found: dict[str, Tensor] = {}
        for slot in self.slots:
            found |= dict.fromkeys(slot.placeholders, flat[slot.start : slot.start + slot.numel].view(slot.shape))
        return found

    def updated(self) -> None:
        """Bring what the optimizer made of the master weights to the parameters."""
        target = self.flat if self.zero == 0 else self.part
        assert target is not None
        if target.data_ptr() != self.master.data_ptr():
            target.copy_(self.master)

    def held(self) -> tuple[int, int]:
        """Return which elements of the run ``master`` and ``gradient`` are."""
        return (0, self.numel) if self.zero == 0 else self.bounds

    def pieces(self, held: Tensor) -> dict[str, tuple[int, Tensor]]:
        """Return what ``held`` (``master``, ``gradient`` or a state of the optimizer, alike) has of each parameter, by
        name: (first element within the parameter, values); parameters of which it has nothing are left out."""
        low, up = self.held()
        found = {}
        for slot in self.slots:
            start, end = max(low, slot.start), min(up, slot.start + slot.numel)
            if start < end:
                found[slot.name] = (start - slot.start, held[start - low : end - low])
        return found

    def _norm_parts(self, counted: Mapping[str, float]) -> list[tuple[Tensor, float]]:
        """Return the stretches of ``gradient`` that count alike, with what they count."""
        stretches: list[list[float]] = []
        for name, (_, values) in self.pieces(self.gradient).items():
            start = int(values.storage_offset()) - int(self.gradient.storage_offset())
            factor = counted.get(name, 1.0)
            if stretches and stretches[-1][2] == factor:
                stretches[-1][1] = start + values.numel()
            else:
                stretches.append([start, start + values.numel(), factor])
        return [(self.gradient[int(a) : int(b)], factor) for a, b, factor in stretches if factor]

    def square(self) -> Tensor:
        """Return what this rank adds to the square of the global norm."""
        total = self.gradient.new_zeros((), dtype=torch.float64)
        for values, factor in self._counted:
            total += torch.linalg.vector_norm(values).double() ** 2 * factor
        return total

    @property
    def tensors(self) -> list[Tensor]:
        """Everything it keeps for ever."""
        own = [self.flat, self.part, self.master, self.total, self.gradient]
        return [each for each in own if each is not None]


Taken = tuple[Tensor, dict[str, Tensor]]
"""A flat tensor, and the parameters' places in it by placeholder."""


KEEP_FREE = 1
"""Flat tensors that an arena keeps though nobody uses them: making a new one costs less than what it would hold."""


class Arena:
    """Flat tensors that come and go, whole parameters of ZeRO-3 and gradients of one microbatch. Each serves any bucket
    that fits, so there are hardly more than are in use together."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._whole: dict[int, Tensor] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that it keeps, in use or not."""
        return list(self._whole.values())

    def take(self, run: Run, *, zero: bool = False) -> Taken:
        """Return a flat tensor for a run (``zero``: of zeros): the smallest free one that is large enough; else a new
        one, in place of the largest free one."""
        mine = [each for each in self._free if each.dtype == run.dtype]
        fits = [each for each in mine if each.numel() >= run.numel]
        if fits:
            whole = min(fits, key=Tensor.numel)
            self._drop(whole)
        else:
            if mine:
                small = max(mine, key=Tensor.numel)
                self._drop(small)
                self._forget(small)
            whole = torch.empty(run.numel, dtype=run.dtype, device=run.device)
            self._whole[whole.data_ptr()] = whole
        flat = whole[: run.numel]
        if zero:
            flat.zero_()
        key = (whole.data_ptr(), id(run))
        if key not in self._views:
            self._views[key] = run.views(flat)
        return flat, self._views[key]

    def give(self, flat: Tensor) -> None:
        """Take one back; of those that nobody uses few are kept."""
        self._free.append(self._whole[flat.data_ptr()])
        while len(self._free) > KEEP_FREE:
            self._forget(self._free.pop(0))

    def _drop(self, whole: Tensor) -> None:
        self._free = [each for each in self._free if each is not whole]

    def _forget(self, whole: Tensor) -> None:
        del self._whole[whole.data_ptr()]
        self._views = {key: views for key, views in self._views.items() if key[0] != whole.data_ptr()}


class Bucket:
    """The runs of one bucket of the DAG."""

    def __init__(self, index: int, runs: Sequence[Run], *, each: bool) -> None:
        """``each``: its gradient is reduced for each microbatch."""
        self.index, self.runs, self.each = index, tuple(runs), each
        self.zero = self.runs[0].zero if self.runs else 0

    def fixed(self) -> dict[str, Tensor]:
        """Return the parameters that are always whole, by placeholder."""
        return {k: v for run in self.runs if run.flat is not None for k, v in run.views(run.flat).items()}

    def totals(self) -> dict[str, Tensor]:
        """Return where gradients add up over the whole step, by placeholder (none where ``each``)."""
        if self.each:
            return {}
        found: dict[str, Tensor] = {}
        for run in self.runs:
            assert run.total is not None
            found |= run.views(run.total)
        return found

    def names(self) -> Mapping[str, str]:
        """Return names in the model by placeholder."""
        return {each: slot.name for run in self.runs for slot in run.slots for each in slot.placeholders}
