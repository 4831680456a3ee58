"""Synthetic models: uniform small layers, any number of them, for tests, benchmarks and teaching."""

from __future__ import annotations

import re
from dataclasses import replace

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError

_SPEC = re.compile(r"(dense|moe):(\d{1,5})")


def synthetic(
    spec: str,
    stages: int | None = None,
    *,
    seq_len: int = 64,
    hidden: int = 64,
    experts: int = 8,
    vocab: int = 256,
) -> ModelChunks:
    """Return the chunk table of ``dense:N`` or ``moe:N``, N layers.

    With ``stages`` each chunk carries ("PP", stage): contiguous, N / stages layers each, one more on the
    first stages where that does not divide; embedding with the first layer, head with the last. Expert
    chunks carry ("EP", index) always.

    Raises:
        ConfigError: another form, no layers, or more stages than layers.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None or int(match[2]) < 1:
        raise ConfigError(f"synthetic model must read dense:LAYERS or moe:LAYERS, found {spec[:60]!r}")
    kind, layers = match[1], int(match[2])
    if stages is not None and not 1 <= stages <= layers:
        raise ConfigError(f"stages must lie in 1 to {layers} for {spec}, found {stages}")
    moe = kind == "moe"
    table = model_chunks(
        Architecture(
            f"{kind}:{layers}",
            layers,
            hidden,
            0 if moe else 4 * hidden,
            8,
            8,
            max(hidden // 8, 1),
            vocab,
            experts=experts if moe else 0,
            top_k=min(2, experts) if moe else 0,
            expert_ffn=2 * hidden if moe else 0,
        ),
        seq_len,
    )
    if stages is None:
        return table
    stage_of = even_stages(layers, stages)
    chunks = tuple(
        replace(chunk, tags=(*chunk.tags, ("PP", stage_of[min(max(chunk.layer, 0), layers - 1)])))
        for chunk in table.chunks
    )
    return replace(table, chunks=chunks)


def even_stages(layers: int, stages: int) -> list[int]:
    """Return the stage of each layer: contiguous, sizes differ by at most one, longer ones first."""
    short, longer = divmod(layers, stages)
    return [stage for stage in range(stages) for _ in range(short + (stage < longer))]
