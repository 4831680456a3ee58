"""Closed forms of the two ends of a model: embedding and head."""

from __future__ import annotations

from piper_core.arch.chunk import Chunk, Parameter, Saved, Work
from piper_core.arch.parts import Parts, linear
from piper_core.names import Region


def embed(parts: Parts) -> Chunk:
    """Token (and position) lookup; its gradient is all BW."""
    arch, hidden = parts.arch, parts.hidden
    learned, scaled = bool(arch.learned_positions), arch.scaled_embedding
    tie = "embedding" if arch.tied else ""
    parameters = [Parameter("embed.tokens.weight", arch.vocab * arch.hidden, tie=tie)]
    if learned:
        parameters.append(Parameter("embed.positions.weight", arch.learned_positions * arch.hidden, tensor=False))
    ids = 8.0 * parts.seq
    traffic = (5 if learned else 2) + (2 if scaled else 0)
    backward = 5 + (2 if scaled else 0)  # read dy, add into fp32 rows
    return Chunk(
        Region.EMBED,
        -1,
        forward=Work(replicated_bytes=traffic * hidden, kernels=(3 if learned else 1) + scaled),
        backward_input=Work(),
        backward_weight=Work(replicated_bytes=backward * hidden, kernels=2 + scaled),
        parameters=tuple(parameters),
        output_bytes=hidden,
        hidden_bytes=hidden,
        saved=Saved(replicated=ids),
        saved_selective=Saved(replicated=ids),
        saved_full=Saved(replicated=ids),
        stash=Saved(replicated=ids + hidden),
    )


def head(parts: Parts) -> Chunk:
    """Final norm, logits, loss in fp32: 4 bytes a logit kept (softmax), up to 6 more in passing; in 16 bits 2 and 4. A
    cap on logits keeps 2 more (its tanh)."""
    arch, hidden = parts.arch, parts.hidden
    logits = float(parts.seq * arch.vocab)
    norm = parts.norm_cost(hidden)
    cap, wide = 1 if arch.logit_cap else 0, 4 if parts.loss == "fp32" else 2
    forward, backward_input, backward_weight = parts.works(
        [linear(parts.seq, arch.vocab, arch.hidden, "column")],
        memory=((2 + 4 * wide + 12 * cap) * logits, (3 * wide + 2 + 14 * cap) * logits, 0.0),
        replicated=(norm.forward, norm.backward, 0.0),
        kernels=(norm.forward_kernels + 5 + 3 * cap, norm.backward_kernels + 4 + 3 * cap, 1),
    )
    tie = "embedding" if arch.tied else ""
    weight = Parameter("head.projection.weight", arch.vocab * arch.hidden, tie=tie)
    kept = (wide + 2 * cap) * logits
    return Chunk(
        Region.HEAD,
        arch.layers,
        forward,
        backward_input,
        backward_weight,
        core=Work(replicated_bytes=norm.forward, kernels=norm.forward_kernels),
        parameters=(*parts.norm_parameters("head.norm"), weight),
        hidden_bytes=hidden,
        loss_bytes=3 * 4.0 * parts.seq,  # maximum, sum of exponentials, target logit
        saved=Saved(kept, norm.kept + hidden),
        saved_selective=Saved(kept, hidden),
        saved_full=Saved(0.0, hidden),
        stash=Saved(2 * logits, hidden),
        workspace_bytes=(wide + 2) * logits,
    )
