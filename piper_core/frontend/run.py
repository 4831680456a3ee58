"""Run chunk graphs: a whole step of a model, in topological order, without autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from piper_core.errors import ConfigError
from piper_core.frontend.capture import Boxed, boxed, capture, inductor
from piper_core.frontend.collectives import moves_rows
from piper_core.frontend.cut import ChunkGraph, Cut, cut
from piper_core.frontend.recompute import fused, kept
from piper_core.names import Recompute, Region

Compiler: TypeAlias = Literal["none", "inductor"]
ROWS_VARY = (
    "how many rows reach the experts of a rank is known when a chunk runs, and Inductor compiles for one number; "
    "experts that ranks divide need compiler 'none' (run: leave --compile out)"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One chunk graph, compiled: values it reads and makes, those it reads last, those it makes for nobody."""

    name: str
    call: Boxed
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    spent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Step:
    """One forward and backward of a captured model as a list of actions.

    ``split_backward`` runs BI of every chunk, then BW of every chunk; else B whole. ``recompute`` is applied to each
    layer (FULL keeps what comes into the layer; embedding and head are kept as they are). ``compiler`` "inductor"
    compiles each chunk graph; without recompute, backwards then do chains of small operations again rather than read
    their results. ``device`` is where parameters and inputs are.

    Raises:
        ConfigError: graphs to be compiled in which the number of rows is known at run time.
    """

    def __init__(
        self,
        made: Cut,
        *,
        split_backward: bool = False,
        recompute: Recompute = Recompute.NONE,
        compiler: Compiler = "none",
        device: torch.device | str = "cpu",
    ) -> None:
        if compiler == "inductor":
            check_compilable(made)
        self.cut, self.device = made, torch.device(device)
        self._compiler = compiler
        self._compiled: dict[tuple[str, tuple[str, ...]], Boxed] = {}
        self.prelude = self._action("prelude", made.prelude)
        self.actions = self._with_ends(self._order(split_backward, recompute))

    def _order(self, split_backward: bool, recompute: Recompute) -> list[Action]:
        pieces = self.cut.pieces
        forwards: list[Action] = []
        backwards: list[list[Action]] = []
        weights: list[list[Action]] = []
        for _, members in groupby(pieces, key=lambda piece: piece.site.layer):
            group = list(members)
            policy = Recompute.NONE if group[0].site.region in (Region.EMBED, Region.HEAD) else recompute
            joins = self._compiler == "inductor" and policy is Recompute.NONE
            part: list[Action] = []
            late: list[Action] = []
            for i, piece in enumerate(group):
                stay = fused(piece) if joins else kept(piece, policy)
                forwards.append(self._action(f"{piece.site}F", piece.forward_keeping(stay)))
                if policy is not Recompute.NONE:
                    send = policy is Recompute.FULL and i + 1 < len(group)
                    part.append(self._action(f"{piece.site}R", piece.recompute(stay, send=send)))
            for piece in reversed(group):
                whole, first, second = piece.backward, piece.backward_input, piece.backward_weight
                if joins:
                    whole, first, second = (piece.joined(graph, fused(piece)) for graph in (whole, first, second))
                if split_backward:
                    part.append(self._action(f"{piece.site}BI", first))
                    late.append(self._action(f"{piece.site}BW", second))
                else:
                    part.append(self._action(f"{piece.site}B", whole))
            backwards.append(part)
            weights.append(late)
        order = [*forwards, *(a for parts in (backwards, weights) for part in reversed(parts) for a in part)]
        return [action for action in order if action.outputs]

    def _action(self, name: str, graph: ChunkGraph) -> Action:
        inputs, outputs = tuple(n.name for n in graph.inputs), tuple(n.name for n in graph.outputs)
        return Action(name, self._compile(graph), inputs, outputs)

    def _compile(self, graph: ChunkGraph) -> Boxed:
        """Return a callable; equal graphs share one (constants that a graph reads make it its own)."""
        constants = tuple(str(node.target) for node in graph.calls if node.op == "get_attr")
        key = (graph.digest(), constants)
        if key not in self._compiled:
            if self._compiler == "inductor":
                module = graph.module(self.cut.joint.module, in_place=False, device=self.device)
                self._compiled[key] = inductor(module, [node.meta["val"] for node in graph.inputs], self.device)
            else:
                self._compiled[key] = boxed(graph.module(self.cut.joint.module, device=self.device))
        return self._compiled[key]

    def _with_ends(self, actions: list[Action]) -> list[Action]:
        """Say which action reads each value last, so that its memory can go while that runs."""
        joint = self.cut.joint
        stay = {*joint.parameters, *joint.buffers, *(n.name for n in joint.outputs), *self.prelude.outputs}
        stay |= {node.name for piece in self.cut.pieces for _, node in piece.gradients}
        stay |= {node.name for _, node in joint.gradients}
        seen = set(stay)
        made = []
        for action in reversed(actions):
            spent = tuple(name for name in action.inputs if name not in seen)
            unread = tuple(name for name in action.outputs if name not in seen)
            made.append(replace(action, spent=spent, unread=unread))
            seen -= set(action.outputs) - stay  # made again, not needed from before
            seen |= set(action.inputs)
        return made[::-1]

    def __call__(
        self, model: nn.Module, *inputs: Tensor, tangents: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the model's outputs, and the gradients of parameters by name (of inputs as ``input 0``).

        ``tangents`` are the gradients of the outputs, by default 1.
        """
        joint = self.cut.joint
        values = self.bind(model)
        values.update(zip(joint.inputs, inputs, strict=True))
        given = {node.name: node for node in joint.nodes if node.op == "placeholder"}
        for i, name in enumerate(joint.tangents):
            example = given[name].meta["val"]
            values[name] = (
                tangents[i] if tangents else torch.ones(example.shape, dtype=example.dtype, device=self.device)
            )
        with torch.no_grad():
            self.run(values)
        return tuple(values[node.name] for node in joint.outputs), self.gradients(values)

    def bind(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the values that do not change from one microbatch to the next: parameters, buffers, the prelude."""
        joint = self.cut.joint
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        values = {name: parameters[full].detach() for name, full in joint.parameters.items()}
        values |= {name: buffers[full] for name, full in joint.buffers.items()}
        with torch.no_grad():
            made = self.prelude.call([values[name] for name in self.prelude.inputs])
        return values | dict(zip(self.prelude.outputs, made, strict=True))

    def run(self, values: dict[str, Tensor]) -> None:
        """Run every action on ``values``, which it adds to and takes from."""
        for action in self.actions:
            arguments = [values[name] for name in action.inputs]
            for name in action.spent:
                del values[name]
            values.update(zip(action.outputs, action.call(arguments), strict=True))
            for name in action.unread:
                del values[name]

    def gradients(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that the actions left in ``values``, parts from several sites added up."""
        joint = self.cut.joint
        total: dict[str, Tensor] = {}
        for piece in self.cut.pieces:
            for name, node in piece.gradients:
                full = joint.parameters[name]
                total[full] = total[full] + values[node.name] if full in total else values[node.name]
        for name, node in joint.gradients:
            if name in joint.inputs:
                total[f"input {joint.inputs.index(name)}"] = values[node.name]
        return total


def check_compilable(made: Cut) -> None:
    """Raise a ConfigError where Inductor cannot compile the graphs of ``made``."""
    if any(moves_rows(node) for piece in made.pieces for node in piece.forward.calls):
        raise ConfigError(ROWS_VARY)


def chunked(model: nn.Module, inputs: Sequence[Tensor], **options: Any) -> Step:
    """Capture and cut a real model, and return a step of it (options as :class:`Step`'s)."""
    for each in inputs:
        if not isinstance(each, Tensor):
            raise ConfigError(f"inputs of a model must be tensors, found {type(each).__name__}")
    device = next((each.device for each in (*model.parameters(), *inputs)), torch.device("cpu"))
    return Step(cut(capture(model, inputs)), device=device, **options)
