"""``piper-profile``: measure a model on this machine; what was measured; the hardware records."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

from piper_core.errors import ConfigError
from profiler import console
from profiler.console import path

EXAMPLE = "piper-profile --model tiny-llama --seq-len 256 --tp 1,2 --collectives"
TAKING = ("model", "device", "tp", "ep", "cp", "micro_batch", "seq_len", "dtype", "collectives", "budget", "store",
          "dry_run", "threads", "priority", "ranks")  # fmt: skip
"""Options of measuring, which have no place before another command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-profile``; return its exit status."""
    return console.run("piper-profile", _parser, sys.argv[1:] if arguments is None else arguments)


def _parser() -> console.Parser:
    parser = console.Parser(
        prog="piper-profile",
        description="Measure what the chunks of a model and the transfers of a machine take, for searches to use.\n\n"
        f"  {EXAMPLE}\n  piper-search predict --model tiny-llama --cluster cpu --gpus 2 --profile FILE ...",
    )
    parser.set_defaults(run=_take, command=None)
    option = parser.add_argument
    option("--model", help="a preset (piper-search models), or a Hugging Face config.json or its directory")
    option("--device", choices=("cpu", "cuda"), help="what to measure on (default: cpu)")
    option("--tp", type=_numbers, metavar="N,N", help="tensor degrees (default: 1)")
    option("--ep", type=_numbers, metavar="N,N", help="expert degrees (default: 1)")
    option("--cp", type=_numbers, metavar="N,N", help="context degrees (default: 1)")
    option("--micro-batch", type=_numbers, metavar="N,N", help="sequences of a microbatch (default: 1,2,4)")
    option("--seq-len", type=console.at_least_one, metavar="N", help="tokens in a sequence (default: 4096, or less)")
    option("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on cpu, else bfloat16")
    option("--ranks", type=console.at_least_one, metavar="N",
           help="measure for a search over N ranks: every tp and ep that it may ask for, and transfers")  # fmt: skip
    option("--collectives", action="store_true", default=None,
           help="measure collectives and messages between this machine's devices too")  # fmt: skip
    option("--threads", type=console.at_least_one, metavar="N", help="threads of compute a process (default: 1)")
    option("--priority", action="store_true", default=None,
           help="on a busy machine: come before other programs for the milliseconds of a run; needs root")  # fmt: skip
    option("--budget", type=console.duration_s, metavar="TIME", help="when to stop: 90, 90s, 5m (default: 5m)")
    option("--store", type=path, metavar="PATH", help="folder or .profile.json file (default: the person's own store)")
    option("--dry-run", action="store_true", default=None, help="say what would be measured, and for how long")
    option("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", title="other commands")

    def command(name: str, text: str, run: Any) -> console.Parser:
        sub: console.Parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument("--json", action="store_true", default=SUPPRESS, help="print JSON")
        sub.set_defaults(run=run)
        return sub

    clusters = command("clusters", "list the hardware records: every number with its source", _clusters)
    clusters.add_argument("name", nargs="?", help="an id such as p4de, or a cluster file of your own (default: all)")
    show = command("show", "print a profile, or list those there are", _show)
    show.add_argument("file", nargs="?", type=path, metavar="FILE", help="a profile (default: list the store's)")
    show.add_argument("--store", dest="of_store", type=path, metavar="FOLDER", help="the store to list")
    compare = command("compare", "compare two profiles, measurement by measurement", _compare)
    compare.add_argument("first", type=path, metavar="A")
    compare.add_argument("second", type=path, metavar="B")
    bring = command("import", "bring a profile that was taken elsewhere into the store", _import)
    bring.add_argument("file", type=path, metavar="FILE")
    bring.add_argument("--store", dest="of_store", type=path, metavar="FOLDER", help="the store to bring it into")
    give = command("export", "write the store's profile of a model to a file", _export)
    give.add_argument("file", type=path, metavar="FILE", help="a profile of the store")
    give.add_argument("target", type=path, metavar="TARGET", help="the file to write")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) < 2**16 for part in parts):
        raise ArgumentTypeError(f"must be numbers of at least 1 joined by commas, found {text[:40]!r}")
    return tuple(sorted({int(part) for part in parts}))


def _take(options: Namespace) -> int:
    if options.model is None:
        raise ConfigError(f"--model is missing; such as {EXAMPLE}, or see --help")
    from profiler.take import take

    return take(**{name: getattr(options, name) for name in TAKING}, as_json=options.json)


def _refuse_taking(options: Namespace) -> None:
    for name in TAKING:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is an option of measuring, not of {options.command}")


def _show(options: Namespace) -> int:
    _refuse_taking(options)
    from profiler.show import listing, show

    if options.file is None:
        return listing(options.of_store, as_json=options.json)
    return show(options.file, as_json=options.json)


def _compare(options: Namespace) -> int:
    _refuse_taking(options)
    from profiler.show import compare

    return compare(options.first, options.second, as_json=options.json)


def _import(options: Namespace) -> int:
    _refuse_taking(options)
    from profiler.store import import_file

    return _said(f"imported: {import_file(options.file, options.of_store)}", options.json)


def _export(options: Namespace) -> int:
    _refuse_taking(options)
    from profiler.store import load, save

    if options.target.exists():
        raise ConfigError(f"{options.target} exists; name another file, or remove it")
    save(load(options.file), options.target)
    return _said(f"written: {options.target}", options.json)


def _said(text: str, as_json: bool) -> int:
    if as_json:
        what, _, path = text.partition(": ")
        console.print_json({what: path})
    else:
        print(text)
    return 0


def _clusters(options: Namespace) -> int:
    _refuse_taking(options)
    from profiler.spec import cluster_ids

    records = {name: _record(name) for name in ([options.name] if options.name is not None else cluster_ids())}
    if options.json:
        console.print_json(records)
        return 0
    tables = []
    for name, record in records.items():
        rows = [(field, f"{entry['value']:g}", entry["source"]) for field, entry in record.items()]
        tables.append(f"{name}\n{console.table(('number', 'value', 'source'), rows)}")
    print("\n\n".join(tables))
    return 0


def _record(name: str) -> dict[str, dict[str, Any]]:
    """Return {field: {value, source}} of a cluster and its device."""
    from profiler.spec import load_cluster, sources

    cluster = load_cluster(name)
    found: dict[str, dict[str, Any]] = {}
    for field, source in sources(name).items():
        owner: object = cluster.device if field.startswith("device.") else cluster
        found[field] = {"value": getattr(owner, field.removeprefix("device.")), "source": source}
    return found
