"""Matrix products by shape: laws, and published products of an A100."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from profiler.spec import load_device
from search.cost.product import TILES, product_seconds

PCIE, SXM = load_device("a100-pcie-80gb"), load_device("a100-sxm-80gb")
sides = st.integers(1, 20_000)
PUBLISHED = (  # m, n, k, TFLOP/s: SimuMax @4dcaae5, configs/system/a100_pcie.json
    (4096, 1536, 24_576, 230.19), (4096, 576, 5120, 155.00), (4096, 5120, 16_384, 233.78), (4096, 5120, 6144, 239.56),
    (4096, 5120, 3072, 223.86), (24_640, 5120, 1536, 219.31), (4096, 7168, 576, 201.08), (4096, 7168, 2048, 212.55),
    (33_024, 7168, 2048, 228.29), (4096, 5120, 102_400, 237.70), (4096, 1024, 8192, 152.32), (4096, 8192, 1024, 187.96),
)  # fmt: skip


def test_published_products() -> None:
    off = [
        abs(2 * m * n * k / product_seconds(PCIE, m, n, k) / 1e12 / published - 1) for m, n, k, published in PUBLISHED
    ]
    assert sum(off) / len(off) < 0.06
    assert max(off) < 0.2


@given(sides, sides, sides, sides)
def test_more_is_never_quicker(m: int, n: int, k: int, more: int) -> None:
    time = product_seconds(SXM, m, n, k)
    assert time <= product_seconds(SXM, m + more, n, k)
    assert time <= product_seconds(SXM, m, n + more, k)
    assert time <= product_seconds(SXM, m, n, k + more)
    assert time <= product_seconds(SXM, m, n, k, 2)


@given(sides, sides, sides, st.sampled_from([2, 4, 8]))
def test_a_part_takes_at_least_its_share(m: int, n: int, k: int, parts: int) -> None:
    whole = product_seconds(SXM, m, n, k)
    for part in ((m / parts, n, k), (m, n / parts, k), (m, n, k / parts)):
        assert whole / parts * (1 - 1e-9) <= product_seconds(SXM, *part)


@given(sides, sides, sides)
def test_no_product_beats_the_device(m: int, n: int, k: int) -> None:
    assert product_seconds(SXM, m, n, k) * SXM.matmul_flops * SXM.matmul_efficiency >= 2.0 * m * n * k * (1 - 1e-9)


def test_a_wave_that_is_not_full_costs_nearly_a_whole_one() -> None:
    """65B, tensor parallel 8: a product of 2048 tokens fills 64 of 108 multiprocessors; so do 4096 tokens twice."""
    rows, columns, _ = TILES[0]
    assert ceil(2048 / rows) * ceil(1024 / columns) == 64
    one, two, four = (product_seconds(SXM, tokens, 1024, 8192) for tokens in (2048, 4096, 8192))
    assert two > 1.7 * one
    assert four < 1.9 * two
