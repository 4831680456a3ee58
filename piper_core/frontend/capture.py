"""Capture of a model as one joint forward and backward graph: the only file that uses private torch modules.

The model's Python runs on fake tensors, without Dynamo: that is quicker (0.2 s a transformer block against 0.6 s), and
names of parameters stay what they are. Whatever branches on a tensor's value is refused with its line.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node

from piper_core.errors import ConfigError, PiperError
from piper_core.frontend.automatic import annotated


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph in aten operations, functional, and what its ends stand for.

    ``parameters`` and ``buffers`` give the model's names of placeholders (the first name, where a parameter has
    several), ``inputs`` are placeholders by position, ``tangents`` the gradients of ``outputs`` that are given;
    ``gradients`` are (what it is the gradient of: a placeholder, the node that computes it). Values are called by the
    names of their nodes everywhere.
    """

    module: GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[tuple[str, Node], ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.module.graph.nodes)


def capture(model: nn.Module, inputs: Sequence[torch.Tensor], layers: dict[nn.Module, int] | None = None) -> Joint:
    """Return the joint graph of ``model(*inputs)``, with the gradients of all parameters and inputs that need one.

    ``model`` and ``inputs`` may be real (they are not changed, nothing is computed) or built under :func:`fake`.
    ``layers`` gives the blocks' indices where they are not those of the model's repeated blocks.

    Raises:
        ConfigError: the forward fails or needs a tensor's value; the message names the line.
    """
    try:
        with annotated(model, layers):
            return _joint(model, tuple(inputs))
    except PiperError:
        raise
    except Exception as error:
        raise _explained(error, type(model).__name__) from error


@contextmanager
def fake(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Tensors made inside have a shape, a dtype and the CPU as their device, but no memory.

    The device is the CPU and not ``meta``, where attention would be cut into a dozen operations. Relies on
    ``torch._subclasses.FakeTensorMode``; real tensors met inside become constants of the graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(before)


def mode_of(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Return the fake mode that a model or its inputs were built under, the one of the moment, or another."""
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = next((p.fake_mode for p in (*model.parameters(), *inputs) if isinstance(p, FakeTensor)), None)
    return mode or active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def _joint(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Joint:
    """Run AOTAutograd's export.

    Relies on ``aot_export_joint_with_descriptors``, which takes a module as it is, functionalises, names the
    placeholders' and outputs' meanings in ``meta["desc"]``, marks nodes with ``partitioner_tag``, and gives backward
    nodes the ``seq_nr`` of their forward; and on ``preserve_node_meta``, without which nodes carry no annotations.
    """
    from torch._functorch._aot_autograd import descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.fx.traceback import preserve_node_meta

    mode = mode_of(model, inputs)
    with ExitStack() as stack:
        stack.enter_context(preserve_node_meta())
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        placed = tuple(_placed(each, mode) for each in inputs)
        module = aot_export_joint_with_descriptors(stack, model, placed).graph_module
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    given: dict[int, str] = {}
    tangents: list[str] = []
    name_of: dict[Any, str] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        what = node.meta["desc"]
        name_of[what] = node.name
        match what:
            case d.ParamAOTInput():
                parameters[node.name] = names[what.target]
            case d.BufferAOTInput():
                buffers[node.name] = what.target
            case d.PlainAOTInput():
                given[what.idx] = node.name
            case d.TangentAOTInput():
                tangents.append(node.name)
            case _:
                raise ConfigError(f"the model has an input of a kind that is not handled: {what.expr()}")
    outputs: list[Node] = []
    gradients: list[tuple[str, Node]] = []
    last = next(iter(reversed(module.graph.nodes)))
    for value, each in zip(last.args[0], last.meta["desc"], strict=True):
        match each:
            case d.PlainAOTOutput():
                outputs.append(value)
            case d.GradAOTOutput() if value is not None:
                gradients.append((name_of[each.grad_of], value))
            case None | d.GradAOTOutput():
                pass
            case d.InputMutationAOTOutput():
                raise ConfigError(
                    f"the forward writes into {each.mutated_input.expr()}; a chunk must not change its inputs or "
                    "buffers: return the new value, or keep the count outside the forward"
                )
            case _:
                raise ConfigError(f"the model has an output of a kind that is not handled: {each.expr()}")
    arguments = tuple(given.get(i, "") for i in range(len(inputs)))
    return Joint(module, parameters, buffers, arguments, tuple(tangents), tuple(outputs), tuple(gradients))


def _placed(value: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return an input as a fake tensor of ``mode`` on the CPU."""
    if getattr(value, "fake_mode", None) is mode:
        return value
    size, stride = tuple(value.shape), value.stride()
    return torch.empty_strided(size, stride, dtype=value.dtype, device="cpu", requires_grad=value.requires_grad)


Boxed: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A function of a list of tensors, which it empties: what is not referred to elsewhere is freed after its last use."""


def boxed(module: GraphModule) -> Boxed:
    """Return a graph as a boxed function.

    Relies on ``torch.fx.graph._BoxedCodeGen``, the calling convention that AOTAutograd uses.
    """
    from torch.fx.graph import _BoxedCodeGen

    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    call: Boxed = module.forward
    return call


def inductor(module: GraphModule, examples: Sequence[Any], device: torch.device | str = "cpu") -> Boxed:
    """Compile a graph with Inductor for inputs like the examples (fake ones, or on ``meta``), but on ``device``.

    Relies on ``torch._inductor.decomposition.select_decomp_table``, the operations that Inductor wants in parts, and
    on ``torch._inductor.compile_fx.compile_fx_inner``, which takes the graph made so and returns a boxed function.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        examples = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device) for each in examples
        ]
        parts = make_fx(module, decomposition_table=select_decomp_table())(*examples)
    call: Boxed = compile_fx_inner(parts, list(examples))
    return call


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep


def _explained(error: Exception, name: str) -> ConfigError:
    """Return the error as one line that names the person's own line of code.

    Relies on the names of the fake tensors' errors: ``DataDependentOutputException`` (a tensor's value is asked for)
    and ``DynamicOutputShapeException`` (a shape would depend on values).
    """
    where = place_of(error.__traceback__)
    kinds = {type(each).__name__ for each in _causes(error)}
    if kinds & {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}:
        what = "needs the value of a tensor while the model is traced"
        hint = "; use torch.where or an index of fixed size in its place, or compute it outside the forward"
    else:
        what, hint = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}", ""
    return ConfigError(f"model {name}: {where} {what}{hint}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def place_of(traceback: TracebackType | None) -> str:
    """Return the innermost line that is neither torch's nor ours, and its text."""
    found = "the forward"
    while traceback is not None:
        file, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if not file.startswith((_TORCH, _OURS, "<")):
            text = linecache.getline(file, line).strip()
            found = f"{Path(file).name}:{line} ({text[:100]})"
        traceback = traceback.tb_next
    return found
