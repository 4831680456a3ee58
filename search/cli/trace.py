"""``piper-search trace``: the chunk table of a model, from its graphs."""

from __future__ import annotations

from piper_core.arch.contract import Method
from piper_core.errors import ConfigError
from piper_core.frontend.table import Kernels, Trace
from piper_core.frontend.trace import trace_model
from profiler import console

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def trace(
    model: str,
    *,
    tp: int,
    micro_batch: int | None,
    seq_len: int | None,
    dtype: str,
    kernels: Kernels,
    as_json: bool,
    sequence: bool = False,
    ep: int = 1,
    cp: int = 1,
    method: Method = "ring",
) -> int:
    """Print the table; return 0.

    Raises:
        ConfigError: torch is not installed, and what is asked for is not in the cache.
    """
    try:
        made = trace_model(
            model, tp=tp, sequence=sequence, ep=ep, cp=cp, method=method, micro_batch=micro_batch, seq_len=seq_len,
            dtype=dtype, kernels=kernels,
        )  # fmt: skip
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("trace needs torch: make setup installs it") from None
    chunks = made.model()
    if as_json:
        console.print_json({
            "model": made.name, "seq_len": made.seq_len, "micro_batch": made.micro_batch, "tp": tp,
            "ep": ep, "cp": cp, "sequence_parallel": sequence, "kernels": kernels,
            "affine_in_micro_batch": made.affine, "layers": made.layers, "parameters": chunks.parameters,
            "active_parameters": chunks.active_parameters, "chunks": made.rows(),
        })  # fmt: skip
        return 0
    print(show_table(made))
    active = chunks.active_parameters
    some = "" if active == chunks.parameters else f", {_short(active)} of them active"
    batch = "1 sequence" if made.micro_batch == 1 else f"{made.micro_batch} sequences"
    only = "" if made.affine else "; costs are not affine in the microbatch, and hold for this one alone"
    divided = {"tp": tp, "ep": ep, "cp": cp}
    ranks = " x ".join(f"{name} {degree}" for name, degree in divided.items() if degree > 1)
    part = f", one rank of {ranks}" if ranks else ""
    print(
        f"{made.name}{part}: {_short(chunks.parameters)} parameters{some}, {made.layers} layers; "
        f"{batch} of {made.seq_len:,} tokens{only}"
    )
    return 0


def show_table(made: Trace) -> str:
    """Return a line for each phase of each distinct chunk."""
    header = ("chunk", "phase", "count", "FLOPs", "read B", "written B", "kernels", "parameters B", "saved B")
    numbers = ("flops", "bytes_read", "bytes_written", "kernels", "parameter_bytes", "saved_bytes")
    rows = [
        (row["id"], row["phase"], str(row["count"]), *(_short(row[name]) for name in numbers)) for row in made.rows()
    ]
    return console.table(header, rows)


def _short(value: float) -> str:
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
