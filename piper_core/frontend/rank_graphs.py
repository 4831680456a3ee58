"""One rank's graphs, for tensor, sequence, expert and context parallelism together.

The graphs of a part of a model are those of every rank; a rank differs in its parameters and buffers alone::

    degrees = Degrees(tensor=2, sequence=True, expert=2)
    part = Part(0, 4, embed=True)                               # a stage: embedding and layers 0 to 3
    cut = rank_graphs(architecture, degrees, part, micro_batch=1, seq_len=512)
    place = {"tensor": 1, "expert": 0}
    module = rank_module(architecture, degrees, place, part)
    with communicating(ProcessGroups({"tensor": one_group, "expert": another})):
        outputs, gradients = Step(cut)(module, rank_part(tokens, degrees, place), tangents=[upstream])

``cut.pieces`` are the chunks in forward order, with F, B, BI, BW and R; ``cut.joint`` names what comes in and goes out:
``inputs`` (tokens, or hidden states of the stage before; then targets, with a head), ``outputs`` (hidden states, or the
loss), ``tangents`` (gradients of the outputs), ``gradients`` (of parameters, and of hidden states that came in).
:class:`piper_core.frontend.run.Step` shows how graphs run, one after another. Nothing here needs a process group.

Collectives are inside the graphs, and go through the communicator of the moment
(:mod:`piper_core.frontend.communicator`): real process groups, or whatever else keeps that protocol. How many rows
experts are given is known when a graph runs, and may be anything.

Between stages go hidden states (b, s / context, hidden), under ``sequence`` (b, s / context / tensor, hidden).

What is left to whoever runs them: the loss is a mean over the rank's own targets, to be weighed (by its tangent, and
:func:`piper_core.models.set_loss_weight` for auxiliary losses); gradients of :func:`summed` are to be summed over
``tensor``, all over ``context``, and of what is not divided by ``expert`` over that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from piper_core.arch.record import Architecture
from piper_core.frontend.capture import capture, fake
from piper_core.frontend.collectives import gathered_again
from piper_core.frontend.context_parallel import parallelize_context, zigzag
from piper_core.frontend.cut import Cut, cut
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.expert_parallel import parallelize_experts
from piper_core.frontend.sharding_plan import TensorGroup, summed_gradients
from piper_core.frontend.tensor_parallel import parallelize
from piper_core.models.stage import Part, Stage, build_stage
from piper_core.names import Region

Place = Mapping[str, int]
"""A rank's place in the group of each axis: "tensor", "expert", "context"; 0 where it is left out."""


def divide(module: nn.Module, degrees: Degrees, place: Place) -> nn.Module:
    """Leave a model, or its embedding, a block or its head, what one rank has of it, in place."""
    if degrees.tensor > 1:
        parallelize(module, TensorGroup(degrees.tensor, place.get("tensor", 0), degrees.sequence))
    if degrees.expert > 1:
        parallelize_experts(module, place.get("expert", 0), degrees.expert)
    if degrees.context > 1:
        parallelize_context(module, place.get("context", 0), degrees.context, degrees.method)
    return module


def rank_module(
    architecture: Architecture,
    degrees: Degrees,
    place: Place | None = None,
    part: Part | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> Stage:
    """Return what one rank holds of a part of a model (default: of all of it).

    ``piper_core.frontend.shares.shares`` says how each parameter is divided.
    """
    where = place or {}
    made = build_stage(
        architecture, part, device=device, dtype=dtype, seed=seed, divide=lambda each: divide(each, degrees, where)
    )
    if made.rotary is not None and degrees.context > 1:
        parallelize_context(made.rotary, where.get("context", 0), degrees.context, degrees.method)
    made.stretch = degrees.tensor if degrees.sequence else 1
    return made


def rank_graphs(
    architecture: Architecture,
    degrees: Degrees,
    part: Part | None = None,
    *,
    micro_batch: int,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    regather: bool = True,
) -> Cut:
    """Return the chunk graphs of each rank, for microbatches of ``micro_batch`` sequences of ``seq_len`` tokens.

    ``regather``: under sequence parallelism keep the rank's part of what was gathered, and gather it again in BW.

    Raises:
        ConfigError: degrees that the model does not allow.
    """
    degrees.check(architecture, seq_len)
    mine = seq_len // degrees.context
    with fake():
        module = rank_module(architecture, degrees, None, part, dtype=dtype)
        if module.embed is not None:
            x = torch.empty(micro_batch, mine, dtype=torch.int64)
        else:
            x = torch.empty(micro_batch, mine // module.stretch, architecture.hidden, dtype=dtype, requires_grad=True)
        targets = [torch.empty(micro_batch, mine, dtype=torch.int64)] if module.head is not None else []
    joint = capture(module, (x, *targets), module.places())
    if degrees.sequence and regather:
        gathered_again(joint)
    return cut(joint, architecture.layers)


def rank_part(x: Tensor, degrees: Degrees, place: Place) -> Tensor:
    """Return the rank's part of tokens or targets (b, s): along the sequence, where ranks divide that."""
    return zigzag(x, place.get("context", 0), degrees.context) if degrees.context > 1 else x


def summed(module: nn.Module, degrees: Degrees) -> tuple[str, ...]:
    """Return the parameters whose gradients are to be summed over the ranks of ``tensor``, sorted."""
    return summed_gradients(module, TensorGroup(degrees.tensor, 0, degrees.sequence)) if degrees.tensor > 1 else ()


def routed_counts(made: Cut) -> dict[int, str]:
    """Return, by layer, the value that says how many copies each expert is given of the rank's tokens, (experts,); the
    F of a router makes it. Balance biases are updated from their sums (:func:`piper_core.models.update_balance`)."""
    found = {}
    for piece in made.pieces:
        if piece.site.region is Region.ROUTER:
            counts = [node for node in piece.sent if node.target is torch.ops.aten.scatter_add.default]
            assert len(counts) == 1, "a router counts copies once"
            found[piece.site.layer] = counts[0].name
    return found
