"""Tensor and sequence parallelism: from a model to the graphs that one rank runs, collectives among them.

The model's weights become DTensors over a mesh, and the capture of a model of DTensors is of local operations with
explicit collectives. Tracing sends nothing, so the mesh may be of a ``fake`` process group of any size; that is a
process-wide default, wherefore :func:`piper_core.frontend.apart.apart` runs such traces elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from piper_core.errors import ConfigError
from piper_core.frontend.capture import Joint, capture
from piper_core.frontend.collectives import settled
from piper_core.frontend.mixture_plan import mixture_plan
from piper_core.frontend.sharding_plan import TensorGroup, block_plan
from piper_core.frontend.vocabulary import divide_loss, embed_plan, head_plan
from piper_core.models.transformer import Block, Embed, Head, Transformer


def parallelize(module: nn.Module, group: TensorGroup) -> nn.Module:
    """Divide a model, or its embedding, a block or its head, over the ranks of ``group``, in place.

    Raises:
        ConfigError: a module of another kind, for which no plan is known.
    """
    plan: dict[str, ParallelStyle] = {}
    heads: list[Head] = []
    for name, part in module.named_modules():
        found: dict[str, ParallelStyle] = {}
        match part:
            case Embed():
                found = embed_plan(part, group)
            case Block():
                found = block_plan(part, group) | mixture_plan(part, group)
            case Head():
                found = head_plan(group)
                heads.append(part)
            case _:
                pass
        plan |= {f"{name}.{child}" if name else child: style for child, style in found.items()}
    if not plan:
        raise ConfigError(f"no tensor parallel plan is known for a {type(module).__name__}; use a built-in model")
    parallelize_module(module, group.mesh, plan)
    if isinstance(module, Transformer) and module.architecture.tied:
        module.head.projection.weight = module.embed.tokens.weight
    for head in heads:
        divide_loss(head, group)
    return module


@contextmanager
def fake_mesh(degree: int) -> Iterator[DeviceMesh]:
    """Give a mesh of ``degree`` ranks of which only this one, the first, exists. Needs a process without groups.

    Relies on ``torch.testing._internal.distributed.fake_pg``, whose group answers collectives at once.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a fake group is the default of its process; run this apart"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        yield init_device_mesh("cpu", (degree,))
    finally:
        dist.destroy_process_group()


def capture_local(
    module: nn.Module,
    inputs: Sequence[Tensor],
    group: TensorGroup,
    layers: dict[nn.Module, int] | None = None,
    *,
    regather: bool = True,
) -> Joint:
    """Return the joint graph of what one rank does of ``module``, which :func:`parallelize` has divided.

    ``regather``: under sequence parallelism keep the rank's part of what was gathered, and gather it again in BW.
    """
    return settled(capture(module, inputs, layers), regather=group.sequence and regather)
