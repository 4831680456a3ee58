"""``piper-search predict``: the price of one strategy, asked for by flags or read from a file."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from piper_core.errors import ConfigError
from profiler import console
from profiler.console import Parser, at_least_one, integer, path

if TYPE_CHECKING:
    from search.predict import Prediction
    from search.profiled import Profiled
    from search.request import Kernels

KERNELS = ("attention", "norm", "dtype")
DEGREES = ("tp", "pp", "dp", "ep", "cp")
FLAGS = ("model", "gpus", "global_batch", "seq_len", "micro_batch", "num_microbatches", *DEGREES, "virtual_stages",
         "zero", "schedule", "recompute", "sequence_parallel", "attention", "norm", "dtype", "sync", "layers",
         "bucket_mib", "outer", "prefetch")  # fmt: skip
"""Options that describe a strategy; with a FILE those that do not say which kernels run it have no place."""


def add_options(parser: Parser) -> None:
    """Add the options of the command; their destinations begin with ``of_``, apart from those of the search."""

    def option(flag: str, text: str, **more: object) -> None:
        more = {"dest": f"of_{flag.replace('-', '_')}"} | more
        parser.add_argument(f"--{flag}", help=text, **more)  # type: ignore[arg-type]  # argparse's own overloads

    parser.add_argument("of_file", nargs="?", type=path, metavar="FILE", help="a strategy file; or say it by options:")
    option("model", "a preset, or a Hugging Face config.json or its directory", metavar="MODEL")
    option("cluster", "an id (piper-search clusters) or a file of your own (default: the file's own, or p4de)",
           metavar="ID")  # fmt: skip
    option("gpus", "number of GPUs (default: the product of the degrees)", type=at_least_one, metavar="N")
    option("global-batch", "sequences in a step", type=at_least_one, metavar="N")
    option("seq-len", "tokens in a sequence (default: 4096)", type=at_least_one, metavar="N")
    option("micro-batch", "sequences in a microbatch (default: 1)", type=at_least_one, metavar="N")
    option("num-microbatches", "microbatches in a step", type=at_least_one, metavar="N")
    for name, what in zip(DEGREES, ("tensor", "pipeline", "data", "expert", "context"), strict=True):
        option(name, f"{what} degree", type=at_least_one, metavar="N")
    option("virtual-stages", "stages of each pipeline rank", type=at_least_one, metavar="N")
    option("zero", "ZeRO stage (default: 0)", type=integer, choices=range(4))
    option("schedule", "schedule family (default: 1f1b, with virtual stages interleaved_1f1b)", metavar="NAME")
    option("recompute", "none, selective, full, or the number of layers of each stage (default: none)", metavar="WHAT")
    option("sequence-parallel", "with --tp: divide the sequence too", action="store_true", default=None)
    option("attention", "kernel (default: flash2)", choices=("flash2", "flash1", "unfused"))
    option("norm", "kernels of norms and activations (default: fused)", choices=("fused", "unfused"))
    option("dtype", "of weights and activations (default: bf16)", choices=("bf16", "fp16"))
    option("sync", "barrier between steps (default: global_norm)", choices=("global_norm", "none", "post_validation"))
    option("layers", "layers per stage: even, balanced, or 9,9,10,8 (default: even)", type=_layers, metavar="HOW")
    option("bucket-mib", "size of gradient buckets, 0 for one a stage (default: about one layer)", type=_mib,
           metavar="MIB")  # fmt: skip
    option("outer", "outermost axis of the mesh on the topology (default: pp)", choices=("pp", "dp"))
    option("prefetch", "gathers of parameters that may run ahead of compute (default: 1)", type=at_least_one,
           metavar="N")  # fmt: skip
    option("table", "predict each row of a CSV of runs, with the columns of published tables", type=path, metavar="CSV")
    option("out", "with --table: the CSV to write", type=path, metavar="CSV")
    option("profile", "price with what was measured: a file of piper-profile; auto: this machine's own, taken now "
           "where there is none; none: nothing measured (default: this machine's own, where it is what is priced)",
           type=path, metavar="FILE")  # fmt: skip
    option("timeline", "write a picture (.html, .svg) or a Perfetto trace (.json) of the step", type=path,
           metavar="FILE")  # fmt: skip


def run(options: Namespace) -> int:
    """Predict and print; return the exit status."""
    from search.cli.timeline import check_target, write_timeline

    if options.of_table is not None or options.of_out is not None:
        return _table(options)
    target: Path | None = options.of_timeline
    if target is not None:
        check_target(target)
    found = _from_file(options) if options.of_file is not None else _from_flags(options)
    measured = _profiled(options, found)
    if measured is not None:
        found = measured.found
    if target is not None:
        write_timeline(found, target)
    if options.json:
        from search.report.breakdown import critical_path

        more = {} if measured is None else {"profile": measured.to_data()}
        console.print_json(found.to_data() | {"critical_path": critical_path(found.simulation)} | more)
        return 0
    from search.report.breakdown import show_prediction

    print(show_prediction(found, capacity_bytes=found.memory.capacity))
    if measured is not None:
        print("\n" + "\n".join(measured.lines()))
    if target is not None:
        print(f"written: {target}")
    return 0


def _profiled(options: Namespace, found: Prediction) -> Profiled | None:
    """Return the prediction by the profile that was named, by the store's own, or by one that is taken now (auto); None
    where there is none."""
    header, path = found.strategy.header, options.of_profile
    if path is not None and str(path) == "none":
        return None
    if header.model is None or header.model.startswith(("dense:", "moe:")):
        if path is not None:
            raise ConfigError("--profile: a synthetic model cannot have been measured; leave it out")
        return None
    from piper_core.arch.huggingface import load_architecture
    from profiler.spec import load_cluster
    from search.cli.choose_profile import choose_profile
    from search.profiled import by_profile

    architecture = load_architecture(options.of_model or header.model)
    cluster = load_cluster(options.of_cluster or header.cluster or "p4de")
    ranks = len({rank for row in found.compiled.plan.rows for rank in row})
    batch = header.global_batch or 1, found.compiled.dag.model.seq_len
    named = None if path is None else str(path)
    chosen = choose_profile(named, architecture, cluster, ranks, batch, hidden=options.json)
    if chosen is None:
        return None
    return by_profile(found, chosen.profile, architecture, cluster, where=f"--profile {chosen.path}")


def _table(options: Namespace) -> int:
    """Predict a table, write it with its predictions, say how many rows have one."""
    from piper_core.program.write import replace_file
    from search.table_mode import predict_rows, read_table, write_table

    table, out = options.of_table, options.of_out
    if table is None or out is None:
        raise ConfigError("--table CSV and --out CSV go together: what to predict, and where to write it")
    beside = [name for name in (*FLAGS, "file", "cluster", "timeline") if getattr(options, f"of_{name}") is not None]
    if beside:
        what = "a strategy file" if beside[0] == "file" else f"--{beside[0].replace('_', '-')}"
        raise ConfigError(f"{what} has no place beside --table, whose rows say what ran; drop it")
    columns, rows = read_table(table)
    found = predict_rows(rows, str(table))
    reasons = [each for each in found if isinstance(each, str)]
    replace_file(out, write_table(columns, rows, found))
    if options.json:
        console.print_json({"rows": len(rows), "predicted": len(rows) - len(reasons), "written": str(out),
                            "not_predicted_because": {why: reasons.count(why) for why in reasons}})  # fmt: skip
        return 0
    print(f"{len(rows) - len(reasons)} of {len(rows)} rows predicted")
    for why in dict.fromkeys(reasons):
        print(f"  {reasons.count(why)} not predicted: {why}")
    print(f"written: {out}")
    return 0


def _from_file(options: Namespace) -> Prediction:
    from piper_core.program.strategy import load
    from profiler.spec import load_cluster
    from search.predict import predict_strategy

    for name in FLAGS:
        if name not in KERNELS and getattr(options, f"of_{name}") is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no place beside a strategy file; edit the file, or drop it"
            )
    cluster = None if options.of_cluster is None else load_cluster(options.of_cluster)
    return predict_strategy(load(options.of_file), cluster, _kernels(options))


def _kernels(options: Namespace) -> Kernels | None:
    """Return the kernels that the options name, None where they name none."""
    from search.request import Kernels

    given = {name: value for name in KERNELS if (value := getattr(options, f"of_{name}")) is not None}
    return Kernels(**given) if given else None


def _from_flags(options: Namespace) -> Prediction:
    from piper_core.arch.huggingface import load_architecture
    from piper_core.names import Sync
    from profiler.spec import load_cluster
    from search.predict import predict
    from search.request import Kernels, Request

    if options.of_model is None:
        raise ConfigError("give a strategy FILE, or --model and the degrees; see piper-search predict --help")
    given = {
        name: value for name in FLAGS if name not in KERNELS and (value := getattr(options, f"of_{name}")) is not None
    }
    if "sync" in given:
        given["sync"] = Sync(given["sync"])
    architecture = load_architecture(given.pop("model"))
    cluster = load_cluster(options.of_cluster or "p4de")
    return predict(Request(architecture, cluster, kernels=_kernels(options) or Kernels(), **given))


def _layers(text: str) -> tuple[int, ...] | str:
    if text in ("even", "balanced"):
        return text
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise ArgumentTypeError(f"must be even, balanced, or numbers joined by commas, found {text[:40]!r}")
    return tuple(map(int, parts))


def _mib(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise ArgumentTypeError(f"must be an integer of at least 0, found {text[:40]!r}")
    return int(text)
