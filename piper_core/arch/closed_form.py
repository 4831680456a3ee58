"""Closed-form chunk tables: what each region of a transformer computes, moves and keeps for one sequence.

Bytes are of 2-byte activations and weights unless said otherwise; weight gradients are accumulated in 4 bytes. The
regions are in ``parts_attention``, ``parts_feed_forward`` and ``parts_ends``; names of parameters are those of
``piper_core.models``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from piper_core.arch.chunk import AttentionKernel, Chunk, Fusion, LossWidth, ModelChunks
from piper_core.arch.contract import shard_units
from piper_core.arch.parts import Parts
from piper_core.arch.parts_attention import attention as attention_chunk
from piper_core.arch.parts_ends import embed, head
from piper_core.arch.parts_feed_forward import expert, mlp, router
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import Region


def model_chunks(
    architecture: Architecture,
    seq_len: int,
    *,
    attention: AttentionKernel = "flash2",
    norm: Fusion = "fused",
    activation: Fusion | None = None,
    dropout: bool = False,
    loss: LossWidth = "fp32",
) -> ModelChunks:
    """Return the chunk table of ``architecture`` at ``seq_len`` tokens a sequence.

    ``norm`` "unfused" is eager RMSNorm in fp32, which keeps an fp32 input and the normalised value too;
    ``activation`` "unfused" keeps silu(gate) beside gate, up and product (default: as ``norm``). ``dropout`` is on what
    attention and feed-forward add to the residual, and on the scores of an attention that writes them. ``loss`` is the
    width in which the loss is computed from logits of 16 bits.

    Raises:
        ConfigError: sequence length or kernel out of range.
    """
    if seq_len < 1 or (architecture.learned_positions and seq_len > architecture.learned_positions):
        most = f"1 to {architecture.learned_positions}" if architecture.learned_positions else "at least 1"
        raise ConfigError(f"model {architecture.name!r}: sequence length must be {most}, found {seq_len}")
    if attention not in get_args(AttentionKernel):
        known = ", ".join(get_args(AttentionKernel))
        raise ConfigError(f"attention must be one of {known}; found {attention!r}")
    if norm not in ("fused", "unfused") or activation not in ("fused", "unfused", None):
        raise ConfigError(f"norm and activation must be fused or unfused, found {norm!r} and {activation!r}")
    if loss not in get_args(LossWidth):
        raise ConfigError(f"loss must be fp32 or half, found {loss!r}")
    parts = Parts(architecture, seq_len, attention, norm, activation or norm, dropout, loss)
    chunks = [embed(parts)]
    edges: list[tuple[int, int, float]] = []
    dense = (attention_chunk(parts), mlp(parts)) if architecture.ffn else ()
    mixture = (attention_chunk(parts), router(parts), expert(parts)) if architecture.experts else ()
    for layer in range(architecture.layers):
        first = len(chunks)
        edges.append((first - 1, first, parts.hidden))
        for template in mixture if architecture.is_moe(layer) else dense:
            index = layer - architecture.dense_layers
            chunks.append(_at_layer(template, layer, index))
        edges.append((first, first + 1, parts.hidden))
        if architecture.is_moe(layer):
            edges += [(first, first + 2, parts.hidden), (first + 1, first + 2, chunks[first + 1].output_bytes)]
    edges.append((len(chunks) - 1, len(chunks), parts.hidden))
    chunks.append(head(parts))
    units = shard_units(architecture, seq_len)
    return ModelChunks(architecture.name, architecture.layers, seq_len, tuple(chunks), tuple(edges), units=units)


def _at_layer(template: Chunk, layer: int, mixture: int) -> Chunk:
    """Return ``template`` as a chunk of ``layer``; its Work and Saved records are shared, not copied. Expert regions
    are numbered: ``mixture``."""
    parameters = tuple(replace(p, name=f"layers.{layer}.{p.name}") for p in template.parameters)
    tags = (("EP", mixture),) if template.region is Region.EXPERT else ()
    return replace(template, layer=layer, parameters=parameters, tags=tags)
