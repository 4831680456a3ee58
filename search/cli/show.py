"""Print plans, models and clusters."""

from __future__ import annotations

import re
import shutil
import sys
from typing import TYPE_CHECKING

from piper_core.ir.action import format_slots
from profiler import console
from search.slots import compute_slots

if TYPE_CHECKING:
    from piper_core.schedule.plan import Plan

_COLOURS = {"F": 34, "B": 32, "BI": 36, "BW": 33, "R": 35}
_COMPUTE = re.compile(r"(?<=[ (])\d+(F|BI|BW|B|R)\d+(?=[ )]|$)", re.MULTILINE)


def count(n: int | None, word: str, plural: str = "s") -> str:
    """Return ``1 stage``, ``1,024 stages``."""
    return f"{n or 0:,} {word}{'' if n == 1 else plural}"


def show_grid(plan: Plan) -> str:
    """Return the compute order, a line a row: coloured and cut to the width of a terminal, plain elsewhere."""
    lines = grid_lines(plan)
    if sys.stdout is None or not sys.stdout.isatty():
        return "\n".join(lines)
    width = shutil.get_terminal_size().columns
    text = "\n".join(line if len(line) <= width else line[: width - 4] + " ..." for line in lines)
    if console.plain(sys.stdout):
        return text
    return _COMPUTE.sub(lambda word: f"\x1b[{_COLOURS[word[1]]}m{word[0]}\x1b[0m", text)


def grid_lines(plan: Plan) -> list[str]:
    """Return the compute order, a line a row."""
    return [f"{row}: {format_slots(compute_slots(plan, row))}" for row in range(len(plan.rows))]


def _size(n: int) -> str:
    return f"{n / 1e9:.4g} B" if n >= 1e8 else f"{n / 1e6:.3g} M"


def show_models(*, as_json: bool) -> int:
    """Print the presets with what fixes their size, and the FLOPs of one trained token; return 0."""
    from dataclasses import asdict

    from piper_core.arch import PRESETS, model_chunks

    data, rows = {}, []
    for name, each in PRESETS.items():
        seq_len = min(4096, each.max_seq)
        table = model_chunks(each, seq_len)
        total, active, flops = table.parameters, table.active_parameters, each.model_flops_per_token(seq_len)
        data[name] = {"parameters": total, "active_parameters": active, "flops_per_token": flops,
                      "flops_seq_len": seq_len, **asdict(each)}  # fmt: skip
        ffn = f"{each.expert_ffn or each.ffn:,}"
        experts = f"{each.top_k} of {each.experts}" if each.experts else ""
        counts = (each.layers, each.hidden, ffn, each.heads, each.kv_heads, f"{each.vocab:,}")
        sizes = (_size(total), _size(active), f"{flops / 1e9:,.3g}")
        rows.append((name, *sizes, *map(str, counts), experts))
    if as_json:
        console.print_json(data)
        return 0
    header = ("model", "parameters", "active", "GFLOP a token", "layers", "hidden", "ffn", "heads", "kv heads",
              "vocabulary", "experts")  # fmt: skip
    print(console.table(header, rows))
    print("FLOPs: forward and backward of one token, at 4096 tokens a sequence or as many as the model takes.")
    return 0


def show_clusters(*, as_json: bool) -> int:
    """Print the clusters with the figures that decide most; return 0."""
    from dataclasses import asdict

    from profiler.spec import cluster_ids, load_cluster

    clusters = {name: load_cluster(name) for name in cluster_ids()}
    if as_json:
        console.print_json({name: asdict(each) for name, each in clusters.items()})
        return 0
    header = ("cluster", "device", "GiB", "TFLOP/s", "GPUs a node", "link GB/s", "node network GB/s")
    rows = [
        (
            name,
            each.device.name,
            f"{each.device.memory_bytes / 2**30:.0f}",
            f"{each.device.matmul_flops / 1e12:.4g}",
            str(each.gpus_per_node),
            f"{each.link_bytes_per_s / 1e9:.4g}",
            f"{each.nics_per_node * each.nic_bytes_per_s / 1e9:.4g}",
        )
        for name, each in clusters.items()
    ]
    print(console.table(header, rows))
    return 0
