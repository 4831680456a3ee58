"""What one rank does to compare expert and context parallel models with whole ones, eagerly and as chunk graphs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from piper_core.arch.contract import Method
from piper_core.arch.record import Architecture
from piper_core.frontend.capture import capture
from piper_core.frontend.context_parallel import parallelize_context, zigzag
from piper_core.frontend.cut import cut
from piper_core.frontend.expert_parallel import is_divided, parallelize_experts, sum_counts
from piper_core.frontend.run import Step
from piper_core.models import counting, set_loss_weight, update_balance
from piper_core.models.transformer import Transformer
from tests.torch_cpu.parallel.models import batch, built, places, relative, worst


def expert_parallel(
    cases: tuple[tuple[Architecture, str], ...], mesh: DeviceMesh
) -> dict[tuple[str, str], tuple[float, float, list[int], float]]:
    """Return, by (model, routing), the errors of loss and gradients, copies by expert, the error of balance biases.

    Every rank has a slice of its own; one process runs the slices in turn. ``tied`` routing gives all copies to the
    first experts, ``one`` all copies to the last expert of all.
    """
    rank, size, found = mesh.get_local_rank(), mesh.size(), {}
    for architecture, routing in cases:
        whole, model = _routed(architecture, routing), _routed(architecture, routing)
        for each in (whole, model):
            set_loss_weight(each, 1 / size)
        losses = []
        with counting(whole) as counts:
            for other in range(size):
                loss = whole(*batch(other))
                (loss / size).backward()
                losses.append(loss.detach())
        update_balance(whole, counts)
        parallelize_experts(model, dist.group.WORLD)
        with counting(model) as own:
            loss = model(*batch(rank))
        (loss / size).backward()
        update_balance(model, sum_counts(own, dist.group.WORLD))
        gradients, expected = _gradients(model), _gradients(whole)
        for name in gradients:
            if is_divided(name):
                expected[name] = expected[name].chunk(size)[rank]
            else:
                dist.all_reduce(gradients[name])
        buffers = dict(model.named_buffers())
        biases = [relative(buffers[n], b) for n, b in whole.named_buffers() if n.endswith("router.bias")]
        found[architecture.name, routing] = (
            relative(loss.detach(), losses[rank]),
            worst(gradients, expected),
            counts[0].tolist(),
            max(biases, default=0.0),
        )
    return found


def _routed(architecture: Architecture, routing: str) -> Transformer:
    model = built(architecture)
    router = model.layers[0].moe.router
    with torch.no_grad():
        if routing == "tied":
            router.scores.weight.zero_()
        if routing == "one":
            router.bias[-1] = 10.0
    return model


def context_parallel(
    cases: tuple[tuple[Architecture, Method], ...], mesh: DeviceMesh
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return the error of the loss and the greatest of any gradient, by (model, method, eager or graphs)."""
    rank, size, found = mesh.get_local_rank(), mesh.size(), {}
    for architecture, method in cases:
        tokens, targets = batch(1)
        whole = built(architecture)
        expected = whole(tokens, targets)
        expected.backward()
        model = parallelize_context(built(architecture), mesh, method)
        mine = zigzag(tokens, rank, size), zigzag(targets, rank, size)
        share = (mine[1] != -100).sum().double() / (targets != -100).sum()
        for how in ("eager", "graphs"):
            if how == "eager":
                loss = model(*mine)
                (loss * share).backward()
                gradients = _gradients(model)
            else:
                step = Step(cut(capture(model, mine, places(model))), split_backward=True)
                (loss,), gradients = step(model, *mine, tangents=[share])
            total = loss.detach() * share
            dist.all_reduce(total)
            for gradient in gradients.values():
                dist.all_reduce(gradient)
            found[architecture.name, method, how] = (
                relative(total, expected.detach()), worst(gradients, _gradients(whole))
            )  # fmt: skip
    return found


def _gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
