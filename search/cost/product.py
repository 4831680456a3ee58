"""Time of one matrix product by its shape: tiles, waves, and the inner dimension.

The output is cut into tiles, each done by one multiprocessor. A tile takes (k + k0) steps of the inner dimension, where
k0 is its prologue and epilogue (``Device.inner_overhead``); smaller tiles reuse less of what they load and are slower
for each FLOP. Tiles run in waves of one a multiprocessor. A library picks the tile, and whether to divide k over
several tiles that are summed afterwards; so does this, for the least time.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from profiler.spec import Device

TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.78),
    (64, 256, 0.78),
    (256, 64, 0.78),
    (128, 64, 0.6),
    (64, 64, 0.58),
)
"""(rows, columns, speed): output tiles of tensor-core kernels and their speed against the largest (fitted, with
``WHOLE_WAVES``, to 183 products of SimuMax's a100_pcie.json: mean error 2.8 %)."""
WHOLE_WAVES = 0.7
"""How far the last wave of tiles counts as a whole one: the rest overlaps with what follows or is taken up by uneven
clocks of the multiprocessors."""
SPLITS = (1, 2, 4)
"""Parts that the inner dimension may be divided into."""
EXACT = 1e-9
"""What rounding may add to a number of tiles that is whole."""
PARTIAL_BYTES = 8
"""Traffic of an element of a partial sum: written and read in 4 bytes."""


@lru_cache(maxsize=65536)
def product_seconds(device: Device, m: float, n: float, k: float, groups: float = 1.0) -> float:
    """Return the seconds of ``groups`` products m x k times k x n, run together."""
    multiprocessor_flops = device.matmul_flops * device.matmul_efficiency / device.multiprocessors
    partial_s = m * n * groups * PARTIAL_BYTES / (device.memory_bytes_per_s * device.memory_efficiency)
    least = float("inf")
    for rows, columns, speed in TILES:
        tiles = ceil(m / rows - EXACT) * ceil(n / columns - EXACT) * groups
        tile_s = 2.0 * rows * columns / (multiprocessor_flops * speed)
        for parts in SPLITS:
            waves = tiles * parts / device.multiprocessors
            waves = max(1.0, (1 - WHOLE_WAVES) * waves + WHOLE_WAVES * ceil(waves - EXACT))
            seconds = waves * tile_s * (k / parts + device.inner_overhead) + (parts > 1) * parts * partial_s
            least = min(least, seconds)
    return least
