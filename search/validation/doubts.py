"""Published runs that other published runs contradict; they count in every score, and some are given without them too.

The first doubt rests on measurements alone. The second leans on the memory model too, by which these runs fit with
sequence parallelism only. Both were looked for where predictions were far off.
"""

from __future__ import annotations

from search.validation.rows import Row

DRAINED = (
    "FlashAttention-2 on two pipeline ranks takes longer than FlashAttention 1 in the same layout, by 4 % at a "
    "microbatch of 1 and 63 % at 8, and is 15 % quicker on one: as if the pipeline were drained eight times a step"
)
UNDIVIDED = (
    "said to run without sequence parallelism, but 18 and 25 % quicker than at half the microbatch, and in memory that "
    "holds it with sequence parallelism alone"
)


def doubt(row: Row) -> str | None:
    """Return why a run is in doubt, None where it is not."""
    if row["source"].startswith("Hagemann") and row["micro_batch"]:
        model, pp, tp, b = row["model"], *(float(row[name] or 1) for name in ("pp", "tp", "micro_batch"))
        if model == "LLaMA-13B" and float(row["seq_len"]) == 2048 and pp == 2 and "flash_attention2" in row["notes"]:
            return DRAINED
        if model == "LLaMA-65B" and tp == 8 and b == 4 and row["sp"] == "no":
            return UNDIVIDED
    return None
