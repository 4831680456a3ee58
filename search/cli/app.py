"""The commands of ``piper-search`` and their options. Each imports what it runs when it runs."""

from __future__ import annotations

from pathlib import Path

import typer

from piper_core.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.callback(invoke_without_command=True)
def search(
    context: typer.Context,
    model: str | None = typer.Option(None, help="A preset (piper-search models lists them)."),
    gpus: int | None = typer.Option(None, min=1, help="Number of GPUs."),
    cluster: str = typer.Option("p4de", help="A cluster (piper-search clusters), or a JSON file of your own."),
    global_batch: int = typer.Option(512, min=1, help="Sequences in a step."),
    seq_len: int = typer.Option(4096, min=1, help="Tokens in a sequence."),
    fix: list[str] = typer.Option([], metavar="NAME=VALUE ...", help="Hold a dimension, e.g. --fix pp=4 tp=2."),
    top: int = typer.Option(10, min=1, help="How many strategies to print."),
    out: Path | None = typer.Option(None, help="Folder to write best.strategy.yaml in."),
    seed: int = typer.Option(0, help="Same seed, same answer."),
    budget: float | None = typer.Option(None, min=0.0, help="Seconds to search for; Ctrl-C gives the best so far."),
    json: bool = _JSON,
) -> int:
    """Find the best distributed training strategy for a model on a cluster.

    Example: piper-search --model llama9b --gpus 32 --fix pp=4
    """
    given = [name for name, value in (("--model", model), ("--gpus", gpus)) if value is not None]
    if context.invoked_subcommand is not None:
        if given or fix:
            raise ConfigError(
                f"{(*given, '--fix')[0]} is of the search, not of piper-search {context.invoked_subcommand}"
            )
        return 0
    if model is None or gpus is None:
        missing = "--model" if model is None else "--gpus"
        raise ConfigError(f"{missing} is missing; such as piper-search --model llama9b --gpus 32, or see --help")
    from search.cli.run_search import run_search

    return run_search(
        model=model, gpus=gpus, cluster=cluster, global_batch=global_batch, seq_len=seq_len, fix=fix, top=top,
        json=json, out=out, seed=seed, budget=budget,
    )  # fmt: skip


@app.command()
def check(
    file: Path = typer.Argument(..., metavar="FILE", help="A strategy file, or upstream Piper's array of directives."),
    synthetic: str | None = typer.Option(
        None, metavar="dense:N|moe:N", help="A synthetic model of N layers in place of the file's model."
    ),
    stages: int | None = typer.Option(
        None, min=1, help="Give a synthetic model PP tags. Default: one more than the highest PP that the file names."
    ),
    json: bool = _JSON,
) -> int:
    """Compile a strategy, prove that its plan runs, and print the plan.

    Exit status 0: verified; 2: rejected, with the reason as the last line on stderr.
    """
    from search.cli.check import check as run

    return run(file, synthetic=synthetic, stages=stages, as_json=json)


@app.command()
def models(json: bool = _JSON) -> int:
    """List the models that have a preset."""
    from search.cli.show import show_models

    return show_models(as_json=json)


@app.command()
def clusters(json: bool = _JSON) -> int:
    """List the clusters; piper-profile clusters gives the source of each number."""
    from search.cli.show import show_clusters

    return show_clusters(as_json=json)
