"""The roofline's constants against a few published measurements on A100-SXM."""

from __future__ import annotations

import pytest

from piper_core.arch import Architecture, model_chunks
from piper_core.arch.contract import contract, payload_bytes
from piper_core.names import Collective, Phase, Recompute, ShardKind
from profiler.spec import load_cluster
from search.cost import RooflineCost
from search.cost.software import Software

DGX = RooflineCost(load_cluster("dgx-a100"))
NODE = tuple(range(8))


def gpt(hidden: int, heads: int, layers: int) -> Architecture:
    """A GPT with biases and layer norms."""
    return Architecture(
        "gpt", layers, hidden, 4 * hidden, heads, heads, hidden // heads, 51_200,
        gated=False, bias=True, learned_positions=2048, norm="layer",
    )  # fmt: skip


@pytest.mark.parametrize(("sequence", "forward_ms", "backward_ms"), [(False, 7.7, 11.9), (True, 7.2, 11.8)])
def test_a_22b_layer_on_eight_gpus(sequence: bool, forward_ms: float, backward_ms: float) -> None:
    """Korthikanti 2022, arXiv 2205.05198, table 4: microbatch 4, communication included, overlapped in B."""
    layer = model_chunks(gpt(6144, 64, 48), 2048, attention="unfused", dropout=True).chunks[1:3]
    kind = ShardKind.SEQUENCE if sequence else ShardKind.TENSOR
    software = Software(hides_backward=True)

    def exchange(phase: Phase) -> float:
        return sum(
            software.exposed(chunk.region, phase, e.collective)
            * DGX.collective_s(e.collective, 4 * payload_bytes(e, chunk), NODE)
            for chunk in layer
            for e in contract(chunk.region, kind, phase)
        )

    forward = sum(DGX.compute_s(chunk, Phase.F, 4, 8, sequence) for chunk in layer) + exchange(Phase.F)
    backward = sum(DGX.compute_s(chunk, Phase.B, 4, 8, sequence) for chunk in layer) + exchange(Phase.B)
    assert forward * 1e3 == pytest.approx(forward_ms, rel=0.2)
    assert backward * 1e3 == pytest.approx(backward_ms, rel=0.15)


def test_selective_recompute_of_a_22b_layer() -> None:
    """The same table: 13.2 - 11.9 ms."""
    layer = model_chunks(gpt(6144, 64, 48), 2048, attention="unfused", dropout=True).chunks[1:3]
    extra = sum(DGX.compute_s(c, Phase.R, 4, 8, True, recompute=Recompute.SELECTIVE) for c in layer)
    assert extra * 1e3 == pytest.approx(1.3, rel=0.45)


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "microbatch", "published_ms"),
    [
        (2304, 24, 3, 6, (18.5, 18.1, 9.3)),
        (4096, 32, 4, 3, (29.8, 29.4, 19.6)),
        (5120, 40, 3, 1, (11.3, 11.3, 8.1)),
        (6144, 48, 2, 1, (10.4, 10.2, 7.7)),
    ],
)
def test_stages_of_the_zero_bubble_paper(
    hidden: int, heads: int, layers: int, microbatch: int, published_ms: tuple[float, ...]
) -> None:
    """arXiv 2401.10241, table 9, sequence 1024: F, BI, BW."""
    layer = model_chunks(gpt(hidden, heads, layers), 1024, attention="unfused", dropout=True).chunks[1:3]
    for phase, published in zip((Phase.F, Phase.BI, Phase.BW), published_ms, strict=True):
        stage = layers * sum(DGX.compute_s(chunk, phase, microbatch) for chunk in layer)
        assert stage * 1e3 == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "ranks", "size", "published_us"),
    [
        (Collective.ALL_REDUCE, NODE, 1 << 24, 276.6),
        (Collective.ALL_REDUCE, NODE, 1 << 25, 424.0),
        (Collective.ALL_REDUCE, NODE, 1 << 26, 684.6),
        (Collective.ALL_REDUCE, NODE, 1 << 30, 8203.9),
        (Collective.ALL_GATHER, NODE, 1 << 30, 3704.9),
        (Collective.ALL_TO_ALL, NODE, 1 << 30, 3688.9),
        (Collective.ALL_REDUCE, tuple(range(16)), 1 << 30, 10952.4),
        (Collective.ALL_GATHER, tuple(range(16)), 1 << 30, 5685.6),
        (Collective.ALL_TO_ALL, tuple(range(16)), 1 << 30, 26630.5),
        (Collective.ALL_REDUCE, (0, 8), 1 << 30, 57573.3),
    ],
)
def test_collectives_of_a_dgx(kind: Collective, ranks: tuple[int, ...], size: int, published_us: float) -> None:
    """nccl-tests on 8 A100-SXM, and NCCL 2.17 on NDv4 (mscclpp README)."""
    assert DGX.collective_s(kind, size, ranks) * 1e6 == pytest.approx(published_us, rel=0.15)
