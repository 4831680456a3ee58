"""``piper-profile``: the hardware records, and where each of their numbers comes from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from profiler import console

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``piper-profile``; return its exit status."""
    return console.run("piper-profile", _app, sys.argv[1:] if arguments is None else arguments)


def _app() -> typer.Typer:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=False)

    @app.callback()
    def profile() -> None:
        """Describe the hardware that strategies are priced for.

        For now this command lists records. Measuring chunks and collectives on a machine comes with the runtime.
        """

    @app.command()
    def clusters(
        name: str | None = typer.Argument(
            None, help="An id such as p4de, or a cluster file of your own; default: all."
        ),
        json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> int:
        """List the hardware records: every number with its source."""
        return _clusters(name, as_json=json)

    return app


def _clusters(name: str | None, *, as_json: bool) -> int:
    from profiler.spec import cluster_ids

    records = {each: _record(each) for each in ([name] if name else cluster_ids())}
    if as_json:
        console.print_json(records)
        return 0
    for each, record in records.items():
        rows = [(field, f"{entry['value']:g}", entry["source"]) for field, entry in record.items()]
        print(f"{each}\n{console.table(('number', 'value', 'source'), rows)}\n")
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
