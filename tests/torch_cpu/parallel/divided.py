"""What one rank does to compare divided models with whole ones. Graphs are captured under a fake group, and run with
their collectives bound to a real one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from piper_core.arch.record import Architecture
from piper_core.frontend.capture import Joint, fake
from piper_core.frontend.collectives import bind
from piper_core.frontend.cut import cut
from piper_core.frontend.run import Step
from piper_core.frontend.sharding_plan import TensorGroup, summed_gradients
from piper_core.frontend.tensor_parallel import capture_local, fake_mesh, parallelize
from piper_core.models import build_model
from tests.torch_cpu.parallel.models import BATCH, SEQ, batch, built, places, relative, worst

Graphs = dict[tuple[str, bool], tuple[Joint, str]]


def captured(architectures: tuple[Architecture, ...], size: int) -> Graphs:
    """Return the local graphs of each model, tensor and sequence parallel, and the group that they name."""
    found = {}
    with fake_mesh(size) as mesh:
        for architecture in architectures:
            for sequence in (False, True):
                group = TensorGroup(mesh, sequence)
                with fake():
                    model = parallelize(build_model(architecture, dtype=torch.float64, layers=1), group)
                    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64)
                joint = capture_local(model, (tokens, tokens), group, places(model))
                found[architecture.name, sequence] = joint, mesh.get_group().group_name
    return found


def part_of(whole: torch.nn.Parameter, divided: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of a whole parameter's gradient that a divided one has on a rank."""
    assert whole.grad is not None
    if not isinstance(divided, DTensor):
        return whole.grad
    return whole.grad.chunk(divided.device_mesh.size(), divided.placements[0].dim)[rank]  # type: ignore[attr-defined]


def tensor_parallel(
    architectures: tuple[Architecture, ...], graphs: Graphs, mesh: DeviceMesh
) -> dict[tuple[str, bool, bool], tuple[float, float]]:
    """Return the error of the loss and the greatest of any gradient, by (model, sequence, BI and BW apart)."""
    rank, errors = mesh.get_local_rank(), {}
    for architecture in architectures:
        tokens, targets = batch(1)
        whole = built(architecture)
        expected = whole(tokens, targets)
        expected.backward()
        for sequence in (False, True):
            group = TensorGroup(mesh, sequence)
            model = parallelize(built(architecture), group)
            joint, name = graphs[architecture.name, sequence]
            bind(joint.module, {name: mesh.get_group().group_name})
            summed = summed_gradients(model, group)
            for split in (False, True):
                (loss,), gradients = Step(cut(joint), split_backward=split)(model, tokens, targets)
                for name in summed:
                    dist.all_reduce(gradients[name])
                wanted = {full: part_of(p, model.get_parameter(full), rank) for full, p in whole.named_parameters()}
                errors[architecture.name, sequence, split] = relative(loss, expected.detach()), worst(gradients, wanted)
    return errors
