"""Keep the memory that tensors on a CPU give back.

glibc hands memory at the end of its heap back to the system as soon as it is free. A step that frees all its
activations then has their pages made anew, and zeroed, in the next step: 3 to 5 % of a step of 4 layers, hidden 512.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER, _LARGEST = 2**31 - 1, 32 * 2**20  # glibc refuses to keep single tensors over 32 MiB in its heap


def keep_heap() -> bool:
    """Let the allocator of this process keep what is freed, whoever allocated it; say whether it has such a setting.

    It then holds what the process needed at its peak. Both thresholds are set, since setting one stops glibc from
    adapting the other, which starts at 128 KiB. ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` in a
    process's environment do the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _NEVER))
