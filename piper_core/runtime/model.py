"""Where the graphs, the initial weights and the buffers of one rank come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from piper_core.arch.chunk import Chunk
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.capture import capture
from piper_core.frontend.cut import Cut, cut
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import Place, rank_graphs, rank_module, summed
from piper_core.frontend.shares import Share, shares
from piper_core.models.init import TIED
from piper_core.models.stage import Part
from piper_core.names import Region


@dataclass(frozen=True, slots=True)
class StageModule:
    """What one rank holds of one stage: parameters and buffers by their names in the model, how each parameter is
    divided, and which gradients are parts to be summed over the tensor group."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shares: dict[str, Share]
    summed: tuple[str, ...]


class ModelSource(Protocol):
    """A model as the runtime sees it. ``cut`` is of the whole model as one rank computes it, for one microbatch; it is
    the same for every rank of ``degrees``."""

    @property
    def degrees(self) -> Degrees: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> str: ...

    @property
    def cut(self) -> Cut: ...

    def stage(self, chunks: Sequence[Chunk], place: Place) -> StageModule:
        """Return the part that holds ``chunks``, all those of a stage, as the rank at ``place`` has it."""
        ...

    def canonical(self, name: str) -> str:
        """Return the one name of a parameter that may have several."""
        ...


@dataclass(frozen=True)
class ArchitectureSource:
    """A built-in architecture. Weights depend on the seed and their names alone; no rank ever builds more than its own
    stages, and no more than one block of them undivided."""

    architecture: Architecture
    micro_batch: int
    seq_len: int
    degrees: Degrees = field(default_factory=Degrees)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    regather: bool = True
    device: str = "cpu"

    @cached_property
    def cut(self) -> Cut:
        return rank_graphs(
            self.architecture, self.degrees, micro_batch=self.micro_batch, seq_len=self.seq_len, dtype=self.dtype,
            regather=self.regather,
        )  # fmt: skip

    def stage(self, chunks: Sequence[Chunk], place: Place) -> StageModule:
        module = rank_module(
            self.architecture, self.degrees, place, self._part(chunks), device=self.device, dtype=self.dtype,
            seed=self.seed,
        )  # fmt: skip
        names = {name: self.canonical(name) for name, _ in module.named_parameters()}
        how = shares(module)
        return StageModule(
            {names[name]: each.detach() for name, each in module.named_parameters()},
            dict(module.named_buffers()),
            {names[name]: how[name] for name in names},
            tuple(names[name] for name in summed(module, self.degrees)),
        )

    def canonical(self, name: str) -> str:
        return "embed.tokens.weight" if self.architecture.tied and name == TIED else name

    def _part(self, chunks: Sequence[Chunk]) -> Part:
        regions: dict[int, set[Region]] = {}
        for chunk in chunks:
            regions.setdefault(chunk.layer, set()).add(chunk.region)
        layers = sorted(each for each in regions if 0 <= each < self.architecture.layers)
        whole = {Region.ATTENTION, Region.MLP}, {Region.ATTENTION, Region.ROUTER, Region.EXPERT}
        run = range(layers[0], layers[-1] + 1) if layers else range(0)
        if layers != list(run) or any(regions[each] not in whole for each in layers):
            raise ConfigError(
                "a stage is a run of whole layers; found one that holds parts of layers or leaves some out"
            )
        ends = {region for each in regions.values() for region in each}
        return Part(run.start, run.stop, embed=Region.EMBED in ends, head=Region.HEAD in ends)


@dataclass(frozen=True)
class ModuleSource:
    """A person's module with example inputs of one microbatch; its output is the loss. Only stages divide it."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    degrees: Degrees = field(default_factory=Degrees)

    @cached_property
    def cut(self) -> Cut:
        return cut(capture(self.module, self.inputs))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def device(self) -> str:
        return next(self.module.parameters()).device.type

    @cached_property
    def _names(self) -> Mapping[str, str]:
        first = {id(each): name for name, each in self.module.named_parameters()}
        return {name: first[id(each)] for name, each in self.module.named_parameters(remove_duplicate=False)}

    def stage(self, chunks: Sequence[Chunk], place: Place) -> StageModule:
        names = {self.canonical(each.name) for chunk in chunks for each in chunk.parameters}
        held = {name: each.detach().clone() for name, each in self.module.named_parameters() if name in names}
        return StageModule(held, dict(self.module.named_buffers()), dict.fromkeys(held, ()), ())

    def canonical(self, name: str) -> str:
        return self._names.get(name, name)
