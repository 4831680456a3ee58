"""Trace a model into its chunk table: the public entry, warm from the cache without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_core.arch.contract import shard_units
from piper_core.arch.huggingface import load_architecture
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.apart import apart
from piper_core.frontend.cache import Cache
from piper_core.frontend.degrees import check_tensor
from piper_core.frontend.table import Kernels, Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piper_core.frontend.sharding_plan import TensorGroup

DEFAULT_SEQ_LEN = 4096
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_BATCHES = (2, 3)
"""Sequences of the two captures; 1 is no good, since dimensions of 1 broadcast."""


def trace_model(
    model: str | Path | Architecture,
    *,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    tp: int = 1,
    sequence: bool = False,
    dtype: str = "bfloat16",
    kernels: Kernels = "eager",
    cache: Cache | None = None,
) -> Trace:
    """Return the chunk table of a preset, an architecture, a Hugging Face config or ``file.py:function``.

    The function returns (model, example inputs), which fix shapes and dtype; the batch is dimension 0 of the first
    input, and of every other input that is as long. ``kernels`` "eager" is as traced, "fused" joins chains of small
    operations. With ``tp`` > 1 the table is of one rank of a tensor group, traced in a process of its own;
    ``sequence`` divides the sequence too, where weights are whole. ``cache`` (default: the person's) answers without
    torch where nothing has changed.

    Raises:
        ConfigError: unknown model, bad option, a forward that cannot be traced.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be {', '.join(_DTYPES)}, found {dtype!r}")
    if kernels not in ("eager", "fused"):
        raise ConfigError(f"kernels must be eager or fused, found {kernels!r}")
    store = cache or Cache.default()
    options: dict[str, Any] = {"tp": tp, "sequence": sequence and tp > 1, "kernels": kernels}
    found = _FUNCTION.fullmatch(str(model)) if not isinstance(model, Architecture) else None
    if found is not None:
        if tp != 1:
            raise ConfigError(f"no tensor parallel plan is known for a file.py:function; --tp must be 1, found {tp}")
        if seq_len is not None:
            raise ConfigError("the example inputs fix the sequence length of a file.py:function; leave --seq-len out")
        path = Path(found["file"])
        if not path.is_file():
            raise ConfigError(f"no file {str(path)[:200]!r}")
        key = {"file": str(path.resolve()), "function": found["function"], "micro_batch": micro_batch, **options}
        return store.get(key, lambda: _trace_function(path, found["function"], micro_batch, kernels))
    architecture = model if isinstance(model, Architecture) else load_architecture(str(model))
    length = seq_len or min(DEFAULT_SEQ_LEN, architecture.max_seq)
    if length < 1 or (architecture.learned_positions and length > architecture.learned_positions):
        most = architecture.learned_positions
        raise ConfigError(f"model {architecture.name!r}: sequence length must be 1 to {most}, found {length}")
    key = {"architecture": asdict(architecture), "seq_len": length, "dtype": dtype, **options}
    if tp == 1:
        trace = store.get(key, lambda: _trace_architecture(architecture, length, dtype, kernels))
    else:
        check_tensor(architecture, tp, length, sequence=sequence)
        trace = store.get(key, lambda: apart(_trace_rank, architecture, length, dtype, kernels, tp, sequence))
    return trace.of(micro_batch or 1)


def captured_layers(architecture: Architecture) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which layers to capture, the first two of each run of equal ones, and the place among them of the one
    that stands for each layer."""
    chosen: list[int] = []
    stands: list[int] = []
    for _, run in groupby(range(architecture.layers), key=architecture.is_moe):
        layers = list(run)
        first = len(chosen)
        chosen += layers[:2]
        stands += [first + min(i, 1) for i in range(len(layers))]
    return tuple(chosen), tuple(stands)


def _trace_rank(
    architecture: Architecture, seq_len: int, dtype: str, kernels: Kernels, tp: int, sequence: bool
) -> Trace:
    """Return the table of one rank of ``tp``."""
    from piper_core.frontend.sharding_plan import TensorGroup
    from piper_core.frontend.tensor_parallel import fake_mesh

    with fake_mesh(tp) as mesh:
        return _trace_architecture(architecture, seq_len, dtype, kernels, TensorGroup(mesh, sequence))


def _trace_architecture(
    architecture: Architecture, seq_len: int, dtype: str, kernels: Kernels, group: TensorGroup | None = None
) -> Trace:
    import torch
    from torch import nn

    from piper_core.frontend.capture import capture, fake
    from piper_core.frontend.chunks import exact, table
    from piper_core.frontend.collectives import settled
    from piper_core.frontend.cut import cut
    from piper_core.frontend.layout import Layout
    from piper_core.models import build_block, build_model

    chosen, stands = captured_layers(architecture)
    kind = getattr(torch, dtype)
    cuts = []
    with fake():
        model = build_model(architecture, dtype=kind, layers=1)
        model.layers = nn.ModuleList(build_block(architecture, i, dtype=kind) for i in chosen)
        if group is not None:
            from piper_core.frontend.tensor_parallel import parallelize

            parallelize(model, group)
        for batch in _BATCHES:
            tokens, targets = (torch.empty(batch, seq_len, dtype=torch.int64) for _ in range(2))
            places = {block: index for index, block in enumerate(model.layers)}
            inputs = (tokens, targets)
            joint = capture(model, inputs, places)
            cuts.append(cut(joint if group is None else settled(joint, regather=group.sequence)))
    assert exact(cuts[0], cuts[1], _BATCHES), "costs of an architecture are affine in the microbatch"
    units = shard_units(architecture, seq_len)
    return table(
        architecture.name, cuts, _BATCHES, Layout(stands), seq_len=seq_len, micro_batch=1, kernels=kernels, units=units,
    )  # fmt: skip


def _trace_function(path: Path, function: str, micro_batch: int | None, kernels: Kernels) -> Trace:
    from piper_core.frontend.load import load_function

    model, inputs = load_function(path, function)
    return trace_module(model, inputs, micro_batch=micro_batch, kernels=kernels, name=f"{path.name}:{function}")


def trace_module(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    micro_batch: int | None = None,
    kernels: Kernels = "eager",
    name: str = "",
) -> Trace:
    """Return the chunk table of a module, real or fake, captured whole with example inputs.

    Raises:
        ConfigError: the forward cannot be traced.
    """
    from piper_core.frontend.automatic import repeated
    from piper_core.frontend.capture import capture
    from piper_core.frontend.chunks import exact, table
    from piper_core.frontend.cut import cut
    from piper_core.frontend.layout import Layout
    from piper_core.frontend.load import resized

    blocks = repeated(model)
    names = {module: path for path, module in model.named_modules()}
    prefix = next((names[block].rpartition(".")[0] + "." for block in blocks), "")
    count = len(blocks) or None
    given = inputs[0].shape[0] if inputs[0].dim() else 1
    b = micro_batch or given
    length = inputs[0].shape[1] if inputs[0].dim() > 1 else 1
    batches: tuple[int, ...] = _BATCHES
    try:
        cuts = [cut(capture(model, resized(inputs, batch)), count) for batch in _BATCHES]
    except ConfigError:  # the model may hold its batch fixed: take it as it is
        cuts = []
    if not cuts or not exact(cuts[0], cuts[1], _BATCHES):
        cuts, batches = [cut(capture(model, resized(inputs, b)), count)], (b,)
    layout = Layout(tuple(range(len(blocks))), prefix)
    title = name or type(model).__name__
    units = tuple((kind, 1) for kind in ("tensor", "sequence", "expert", "context"))
    return table(title, cuts, batches, layout, seq_len=length, micro_batch=b, kernels=kernels, units=units)
