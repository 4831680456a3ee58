"""Train a model under a strategy, on real processes: the one class that a person's own loop needs.

::

    with Trainer("tiny-llama", "best.strategy.yaml", AdamW(3e-4)) as trainer:
        for tokens, targets in batches:
            print(trainer.step((tokens, targets)))
        trainer.save("checkpoints")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from piper_core.arch.huggingface import load_architecture
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.run import Compiler
from piper_core.ir.dag import Dag, training_dag
from piper_core.ir.timeline import Timeline
from piper_core.program.strategy import DEFAULT_SEQ_LEN, Strategy, load
from piper_core.runtime import checkpoint, compilable
from piper_core.runtime.actor import Device, How, Job, Stepped
from piper_core.runtime.faults import Fault
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.launch import COMPILE_S, START_S, Gang
from piper_core.runtime.lowering import slicing_of
from piper_core.runtime.model import ArchitectureSource, ModelSource, ModuleSource
from piper_core.runtime.optimizer import AdamW, Clip, Optimizer
from piper_core.runtime.program import Training
from piper_core.runtime.slices import Reduction
from piper_core.runtime.state import Which, assemble
from piper_core.schedule.compile import Compiled, compile_program

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Own: TypeAlias = tuple[nn.Module, tuple[Tensor, ...]]
"""A person's module, and example inputs of one microbatch (the last ones are targets where a loss is given)."""
_Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""What one input of every batch is: its dtype, and its shape but for dimension 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step: its loss, the norm of its gradient, how long the slowest rank took, what each rank measured, and where
    actions were timed the timeline."""

    loss: float
    norm: float
    seconds: float
    ranks: tuple[Stepped, ...]
    timeline: Timeline | None = None


class Trainer:
    """A run of a strategy: one process a rank, started here, ended by :meth:`close`.

    A batch of a built-in model is (tokens, targets), int64 tensors of shape (sequences in a step, tokens in a sequence)
    each: the global batch, of which every rank takes its slices; targets below 0 do not count. A batch of a module of
    your own is its inputs as in the example, but with the global batch in dimension 0 (and the targets last, where a
    loss is given).
    """

    def __init__(
        self, model: str | Architecture | Own, strategy: str | PathLike[str] | Strategy,
        optimizer: Optimizer | None = None, loss: Loss | None = None, *, clip: Clip | None = None,
        device: Device = "cpu", address: str | None = None, dtype: torch.dtype | str = torch.float32, seed: int = 0,
        timeout_s: float = 60.0, start_s: float | None = None, memory_limit_bytes: float | None = None,
        compiler: Compiler = "none", fault: Fault | None = None,
    ) -> None:  # fmt: skip
        """Compile and verify the strategy for the model, then start the ranks.

        ``loss`` (output, targets) -> scalar is for a module that does not return its loss; built-in models do. A call
        that takes longer than ``timeout_s``, and a start that takes longer than ``start_s`` (3 minutes unless given,
        20 where chunks are compiled), ends with an error. ``memory_limit_bytes`` is how much the tensors of a rank may
        take; following that slows steps down. ``compiler`` "inductor": every rank compiles its chunks before the first
        step, which takes from seconds to minutes; torch's own cache of what was compiled makes later starts shorter.
        ``fault`` makes something go wrong.

        Raises:
            ConfigError, DirectiveError, PlanError: the strategy does not fit the model, would not run, or cannot be
                compiled; nothing has been started then. RunError: a rank could not be built.
        """
        self.strategy = strategy if isinstance(strategy, Strategy) else load(strategy)
        header = self.strategy.header
        self.training = Training(optimizer or AdamW(), clip, Reduction(header.reduction))
        dtype = named_dtype(dtype)
        self.compiled, self.source = prepared(model, self.strategy, loss, dtype=dtype, seed=seed, device=device)
        compilable.check(compiler, self.source, local=device == "cpu" and address is None)
        self.slicing = slicing_of(self.compiled)
        ranks = sorted({rank for row in self.compiled.plan.rows for rank in row})
        if ranks != list(range(len(ranks))):
            raise ConfigError(f"ranks must be numbered from 0 on without gaps, found {ranks[:8]}")
        self._about = about(model, self.training.optimizer)
        self.steps = 0
        self.last: Step | None = None
        began = perf_counter()
        job = Job(self.compiled, self.source, self.training, device, timeout_s, memory_limit_bytes, fault, compiler)
        limit_s = start_s or (START_S if compiler == "none" else COMPILE_S)
        self._gang = Gang(job, ranks, address=address, start_s=limit_s)
        self.start_s = perf_counter() - began

    @property
    def ranks(self) -> int:
        return len(self._gang.ranks)

    @property
    def architecture(self) -> Architecture | None:
        """The model, where it is a built-in one."""
        return self.source.architecture if isinstance(self.source, ArchitectureSource) else None

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.strategy.header.seq_len or DEFAULT_SEQ_LEN

    def step(self, batch: Tensor | Sequence[Tensor], how: How = "run") -> float:
        """Run one step on a global batch (see the class); return its loss. ``last`` says more: ``how`` "time"
        measures each action, "memory" what each action takes (that step is slower).

        Raises:
            RunError: a rank failed, died or did not answer in time; the run is over then.
            ConfigError: what is no batch of this run; that goes on.
        """
        given = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        self._check(given)
        import ray

        told = ray.put(given)
        found: list[Stepped] = self._gang.call("step", told, how)
        self.steps += 1
        timeline = _joined(found) if how == "time" else None
        self.last = Step(
            sum(each.loss for each in found), found[0].norm, max(each.seconds for each in found), tuple(found), timeline
        )
        return self.last.loss

    def _check(self, given: tuple[Tensor, ...]) -> None:
        """Refuse what is no batch, before any rank sees it."""
        source = self.source
        if isinstance(source, ArchitectureSource):
            said = "(tokens, targets)"
            wanted: list[_Kind | None] = [(torch.int64, (source.seq_len,))] * 2
        else:
            assert isinstance(source, ModuleSource), "there is no other"
            said, wanted = "the module's inputs", [_kind(each) for each in source.inputs]
        if [_kind(each) for each in given] != wanted:
            size = self.slicing.batch
            expected = ", ".join(_written(each[0], (size, *each[1])) if each else "a number" for each in wanted)
            found = ", ".join(map(_found, given)) or "nothing"
            raise ConfigError(f"a batch of this run is {said}: {expected}; found {found}")
        self.slicing.check(given)
        if isinstance(source, ArchitectureSource):
            vocabulary, (tokens, targets) = source.architecture.vocab, given
            least, most = int(tokens.min()), max(int(tokens.max()), int(targets.max()))
            if least < 0 or most >= vocabulary:
                found = str(least if least < 0 else most)
                raise ConfigError(f"tokens are 0 to {vocabulary - 1} for {source.architecture.name}; found {found}")

    def whole(self, which: Which = "master") -> dict[str, Tensor]:
        """Return all parameters (or "gradient": those of the last step) whole, here: for models that fit."""
        return assemble(part for rank in self._gang.call("held", which) for part in rank)

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write a checkpoint to a folder that all ranks see, in place of the one before; return where it is."""
        part = checkpoint.begin(Path(folder).resolve(), self.steps)
        self._gang.call("save", part)
        return checkpoint.commit(part, self._about | {"steps": self.steps})

    def load(self, folder: str | PathLike[str]) -> None:
        """Go on from the latest checkpoint in a folder, whatever strategy wrote it.

        Raises:
            ConfigError: none is there, it is of another model, or it is broken.
        """
        found, steps = checkpoint.find(Path(folder).resolve(), self._about)
        checkpoint.check_parts(found)
        self._gang.call("load", found)
        self.steps = steps

    def close(self) -> None:
        """End all ranks; again: nothing."""
        self._gang.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def about(model: str | Architecture | Own, optimizer: Optimizer) -> dict[str, str]:
    """Return what a checkpoint must be of to be loaded into a run."""
    return {"model": _name(model), "optimizer": type(optimizer).__name__}


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ConfigError: not one that training knows.
    """
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in known:
        raise ConfigError(f"dtype must be {', '.join(known)}, found {dtype[:40]!r}")
    return known[dtype]


def prepared(
    model: str | Architecture | Own, strategy: Strategy, loss: Loss | None = None, *,
    dtype: torch.dtype = torch.float32, seed: int = 0, device: Device = "cpu",
) -> tuple[Compiled, ModelSource]:  # fmt: skip
    """Compile and verify a strategy for a model, and return where ranks get their parts of the model from."""
    header = strategy.header
    if isinstance(model, tuple):
        module, inputs = model
        whole = module if loss is None else _WithLoss(module, loss)
        compiled = compile_program(strategy.program, _traced(whole, inputs, strategy), header.world)
        return compiled, ModuleSource(whole, inputs, degrees_of(compiled.dag))
    if loss is not None:
        raise ConfigError("built-in models return their loss; leave loss out")
    from piper_core.arch.closed_form import model_chunks

    architecture = model if isinstance(model, Architecture) else load_architecture(str(model))
    length = header.length(architecture)
    base = training_dag(model_chunks(architecture, length), global_batch=header.global_batch, sync=header.sync)
    compiled = compile_program(strategy.program, base, header.world)
    size = slicing_of(compiled).sequences
    source = ArchitectureSource(architecture, size, length, degrees_of(compiled.dag), dtype, seed, device=device)
    return compiled, source


def _traced(module: nn.Module, inputs: Sequence[Tensor], strategy: Strategy) -> Dag:
    """Return the training DAG of a person's module."""
    from piper_core.frontend.trace import trace_module

    size = len(inputs[0])
    chunks = trace_module(module, inputs, micro_batch=size, name=type(module).__name__).model()
    return training_dag(chunks, global_batch=strategy.header.global_batch, sync=strategy.header.sync)


class _WithLoss(nn.Module):
    """A module followed by a loss, whose targets are the last input."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss of the module's output for the last input."""
        return self.loss(self.module(*inputs[:-1]), inputs[-1])


def _name(model: str | Architecture | Own) -> str:
    if isinstance(model, tuple):
        return type(model[0]).__name__
    return model.name if isinstance(model, Architecture) else load_architecture(str(model)).name


def _kind(each: object) -> _Kind | None:
    """Return the dtype of a tensor and its shape but for dimension 0, None for what has none."""
    return (each.dtype, tuple(each.shape[1:])) if isinstance(each, Tensor) and each.dim() else None


def _found(each: object) -> str:
    return _written(each.dtype, each.shape) if isinstance(each, Tensor) else type(each).__name__


def _written(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def _joined(found: Sequence[Stepped]) -> Timeline:
    """Return one timeline of the rows, from the first rank of each."""
    by_row: dict[int, Stepped] = {}
    for each in found:
        if each.lanes:
            by_row.setdefault(each.lanes[0].row, each)
    zero = min((each.began_s for each in by_row.values()), default=0.0)
    return Timeline(tuple(lane for row in sorted(by_row) for lane in by_row[row].lanes)).shifted(-zero)
