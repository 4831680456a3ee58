"""``piper-profile``: the hardware records, and where each of their numbers comes from."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from profiler import console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-profile``; return its exit status."""
    return console.run("piper-profile", _parser, sys.argv[1:] if arguments is None else arguments)


def _parser() -> console.Parser:
    parser = console.Parser(
        prog="piper-profile",
        description="Describe the hardware that strategies are priced for.\n\nFor now this command lists records. "
        "Measuring chunks and collectives on a machine\ncomes with the runtime.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "list the hardware records: every number with its source"
    clusters = commands.add_parser("clusters", help=text, description=text)
    clusters.add_argument("name", nargs="?", help="an id such as p4de, or a cluster file of your own (default: all)")
    clusters.add_argument("--json", action="store_true", help="print JSON")
    clusters.set_defaults(run=_clusters)
    return parser


def _clusters(options: Namespace) -> int:
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
