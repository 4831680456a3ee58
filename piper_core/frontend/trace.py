"""Trace a model into its chunk table: the public entry, warm from the cache without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_core.arch.contract import Method, shard_units
from piper_core.arch.huggingface import load_architecture
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.cache import Cache
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.table import Kernels, Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    ep: int = 1,
    cp: int = 1,
    method: Method = "ring",
    dtype: str = "bfloat16",
    kernels: Kernels = "eager",
    cache: Cache | None = None,
) -> Trace:
    """Return the chunk table of a preset, an architecture, a Hugging Face config or ``file.py:function``.

    The function returns (model, example inputs), which fix shapes and dtype; the batch is dimension 0 of the first
    input, and of every other input that is as long. ``kernels`` "eager" is as traced, "fused" joins chains of small
    operations. With ``tp``, ``ep`` or ``cp`` > 1 the table is of one rank of a tensor, expert and context group:
    ``sequence`` divides the sequence over tensor ranks too, where weights are whole; every expert is taken to have its
    fair share of tokens; a context rank has 1 / ``cp`` of each sequence, and ``method`` is how its attention exchanges.
    ``cache`` (default: the person's) answers without
    torch where nothing has changed.

    Raises:
        ConfigError: unknown model, bad option, a forward that cannot be traced.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be {', '.join(_DTYPES)}, found {dtype!r}")
    if kernels not in ("eager", "fused"):
        raise ConfigError(f"kernels must be eager or fused, found {kernels!r}")
    store = cache or Cache.default()
    degrees = Degrees(tp, sequence and tp > 1, ep, cp, method if cp > 1 else "ring")
    options: dict[str, Any] = {"degrees": asdict(degrees), "kernels": kernels}
    named = named_function(model)
    if named is not None:
        path, function = named
        if not degrees.whole:
            raise ConfigError("no plan is known that divides a file.py:function; tp, ep and cp must be 1")
        if seq_len is not None:
            raise ConfigError("the example inputs fix the sequence length of a file.py:function; leave --seq-len out")
        key = {"file": str(path.resolve()), "function": function, "micro_batch": micro_batch, **options}
        return store.get(key, lambda: _trace_function(path, function, micro_batch, kernels))
    architecture = model if isinstance(model, Architecture) else load_architecture(str(model))
    most = architecture.max_seq
    length = min(DEFAULT_SEQ_LEN, most) if seq_len is None else seq_len
    if not 1 <= length <= most:
        raise ConfigError(f"model {architecture.name!r}: sequence length must be 1 to {most}, found {length}")
    key = {"architecture": asdict(architecture), "seq_len": length, "dtype": dtype, **options}
    degrees.check(architecture, length)
    trace = store.get(key, lambda: _trace_architecture(architecture, length, dtype, kernels, degrees))
    return trace.of(micro_batch or 1)


def named_function(model: str | Path | Architecture) -> tuple[Path, str] | None:
    """Return the file and the function that ``file.py:function`` names; None for a model of another kind.

    Raises:
        ConfigError: there is no such file.
    """
    found = _FUNCTION.fullmatch(str(model)) if not isinstance(model, Architecture) else None
    if found is None:
        return None
    path = Path(found["file"])
    if not path.is_file():
        raise ConfigError(f"no file {str(path)[:200]!r}")
    return path, found["function"]


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


def _trace_architecture(
    architecture: Architecture, seq_len: int, dtype: str, kernels: Kernels, degrees: Degrees
) -> Trace:
    """Return the table of a model, or of one rank."""
    import torch
    from torch import nn

    from piper_core.frontend.capture import capture, fake
    from piper_core.frontend.chunks import exact, table
    from piper_core.frontend.cut import cut
    from piper_core.frontend.layout import Layout
    from piper_core.models import build_block, build_model

    chosen, stands = captured_layers(architecture)
    kind = getattr(torch, dtype)
    cuts = []
    with fake():
        model = build_model(architecture, dtype=kind, layers=1)
        model.layers = nn.ModuleList(build_block(architecture, i, dtype=kind) for i in chosen)
        if not degrees.whole:
            from piper_core.frontend.rank_graphs import divide

            divide(model, degrees, {})
        places = {block: index for index, block in enumerate(model.layers)}
        for batch in _BATCHES:
            tokens, targets = (torch.empty(batch, seq_len // degrees.context, dtype=torch.int64) for _ in range(2))
            joint = capture(model, (tokens, targets), places)
            if degrees.sequence:
                from piper_core.frontend.collectives import gathered_again

                gathered_again(joint)
            cuts.append(cut(joint))
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
    """Return the chunk table of a module, real or fake, captured with example inputs: whole, or with two of its
    repeated blocks where those stand for all.

    Raises:
        ConfigError: the forward cannot be traced.
    """
    from piper_core.frontend.alike import KEPT, are_alike, shortened
    from piper_core.frontend.automatic import repeated
    from piper_core.frontend.capture import capture
    from piper_core.frontend.chunks import exact, table
    from piper_core.frontend.cut import Cut, cut
    from piper_core.frontend.layout import Layout, stands_for_more
    from piper_core.frontend.load import resized

    blocks = list(repeated(model))
    names = {module: path for path, module in model.named_modules()}
    prefix = next((names[block].rpartition(".")[0] + "." for block in blocks), "")
    given = inputs[0].shape[0] if inputs[0].dim() else 1
    b = micro_batch or given
    length = inputs[0].shape[1] if inputs[0].dim() > 1 else 1
    batches: tuple[int, ...] = _BATCHES

    def captured(few: Sequence[nn.Module], *batches: int) -> list[Cut]:
        places = {block: index for index, block in enumerate(few)}
        return [cut(capture(model, resized(inputs, batch), places), len(few) or None) for batch in batches]

    cuts: list[Cut] = []
    layout = Layout(tuple(range(len(blocks))), prefix)
    if are_alike(model, blocks, resized(inputs, _BATCHES[0])):
        with shortened(model, blocks):
            cuts = captured(blocks[:KEPT], *_BATCHES)
        if stands_for_more(cuts[0], KEPT) and exact(cuts[0], cuts[1], _BATCHES):
            layout = Layout((0, *[1] * (len(blocks) - 1)), prefix)
        else:
            cuts = []
    with suppress(ConfigError):  # the model may hold its batch fixed: take it as it is
        cuts = cuts or captured(blocks, *_BATCHES)
    if not cuts or not exact(cuts[0], cuts[1], _BATCHES):
        cuts, batches = captured(blocks, b), (b,)
    title = name or type(model).__name__
    units = tuple((kind, 1) for kind in ("tensor", "sequence", "expert", "context"))
    return table(title, cuts, batches, layout, seq_len=length, micro_batch=b, kernels=kernels, units=units)
