"""The commands of ``piper-search`` and their options. Each imports what it runs when it runs."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentTypeError, Namespace, _SubParsersAction
from typing import Any

from piper_core.errors import ConfigError
from profiler.console import Parser, at_least_one, duration_s, gib, path, seed
from search.objective import OBJECTIVES

EXAMPLE = "piper-search --model llama9b --gpus 32"
DEFAULTS: dict[str, Any] = {"cluster": "p4de", "global_batch": 512, "seq_len": 4096, "top": 10, "seed": 0}
"""What the search takes where an option is not given. The parser leaves it None, so that one given before another
command can be told, and refused."""
CPU_DEFAULTS = {"global_batch": 16, "seq_len": 128}
"""The same on ``cpu``: what processes of one host can train in a moment."""


def parser() -> Parser:
    """Return the parser of ``piper-search``."""
    made = Parser(
        prog="piper-search",
        description=f"Find the best distributed training strategy for a model on a cluster.\n\n  {EXAMPLE} --fix pp=4",
    )
    made.set_defaults(run=_search, command=None)
    option = made.add_argument
    option("--model", help="a preset (piper-search models lists them), or a Hugging Face config.json or its directory")
    option("--gpus", type=at_least_one, metavar="N", help="number of GPUs")
    option("--cluster", help="an id (piper-search clusters) or a file of your own (default: p4de)")
    option("--global-batch", type=at_least_one, metavar="N", help="sequences in a step (default: 512)")
    option("--seq-len", type=at_least_one, metavar="N",
           help="tokens in a sequence (default: 4096, or as many as the model allows)")  # fmt: skip
    option(
        "--fix",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        help="hold axes to values: pp=4 schedule=1f1b,zbv; axes are pp tp dp ep schedule virtual_stages zero "
        "micro_batch num_microbatches recompute sequence_parallel cuts cp outer bucket prefetch streams",
    )
    option("--forbid", nargs="+", action="extend", metavar="NAME=VALUE", help="leave values of axes out: zero=3 tp=8")
    option("--explain", nargs="+", action="extend", metavar="NAME=VALUE", help="say why choices lost: zero=3 pp=8")
    option("--objective", choices=OBJECTIVES,
           help="what to make small: step time (throughput, the default), memory, or both (pareto)")  # fmt: skip
    option("--max-memory", type=gib, metavar="GIB", help="memory of a GPU that may be used (default: all it has)")
    option("--top", type=at_least_one, metavar="N", help="strategies to print (default: 10)")
    option("--out", type=path, metavar="DIR", help="folder for what is found (default: piper-search-out)")
    option(
        "--resume",
        type=path,
        metavar="DIR",
        help="go on with the search that a killed run left in a folder, as if it had not been; --budget counts anew",
    )
    option("--execute", type=executed, metavar="K",
           help="run the K best on this machine's devices and let measurement pick the winner; with too few devices, "
                "rehearse the winner (default: 3 or as many as memory holds; 0: nothing)")  # fmt: skip
    option("--profile", metavar="FILE",
           help="price with what piper-profile measured: a file; auto: this machine's own, taken now where there is "
                "none; none: nothing measured (default: this machine's own, where it is what is searched)")  # fmt: skip
    option("--workers", type=at_least_one, metavar="N", help="processes that evaluate (default: one a core)")
    option("--address", metavar="RAY",
           help="evaluate on the cores of a Ray cluster that runs (host:port, or auto), and execute there what "
                "--execute K asks for")  # fmt: skip
    option("--seed", type=seed, metavar="N", help="same seed and as many batches evaluated, same answer (default: 0)")
    option(
        "--budget",
        type=duration_s,
        metavar="SECONDS",
        help="time to search, which ends between two batches (default: 12); Ctrl-C gives the best so far",
    )
    option("--json", action="store_true", help="print JSON")
    option("--version", action=_Version, nargs=0, help="print the version")
    commands = made.add_subparsers(metavar="COMMAND", dest="command", title="other commands", action=_Commands)

    def command(name: str, text: str, more: str = "") -> Parser:
        sub: Parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.{more}")
        sub.add_argument("--json", action="store_true", default=SUPPRESS, help="print JSON")
        return sub

    check = command("check", "compile a strategy, prove that its plan runs, price it, and print the plan",
                    "\n\nExit status 0: verified. 2: rejected, the reason in the last line on stderr.")  # fmt: skip
    check.add_argument("file", type=path, metavar="FILE", help="a strategy, or upstream Piper's array of directives")
    check.add_argument("--synthetic", metavar="dense:N|moe:N", help="a synthetic model of N layers")
    check.add_argument("--stages", type=at_least_one, metavar="N",
                       help="stages of a synthetic model (default: one more than the highest PP named)")  # fmt: skip
    check.add_argument("--plan", action="store_true", help="print the whole plan too: every action of every stream")
    check.add_argument("--cluster", dest="priced_on", metavar="ID", help="price it on this (default: the header's)")
    check.add_argument("--against", type=path, metavar="FILE",
                       help="say what changed against another one (default: what the header predicts)")  # fmt: skip
    check.add_argument("--watch", action="store_true", help="check again on every save, until Ctrl-C")
    check.set_defaults(run=_check)
    trace = command("trace", "trace a model into chunks, and print what each computes, moves and keeps")
    trace.add_argument("--model", dest="traced", required=True, metavar="MODEL",
                       help="a preset, a Hugging Face config.json or its folder, or file.py:function, "
                            "which returns (model, example inputs)")  # fmt: skip
    trace.add_argument("--tp", type=at_least_one, default=1, metavar="N", help="ranks of a tensor group (default: 1)")
    trace.add_argument("--sequence-parallel", action="store_true",
                       help="with --tp: divide the sequence too, where weights are whole")  # fmt: skip
    trace.add_argument("--ep", type=at_least_one, default=1, metavar="N", help="ranks of an expert group (default: 1)")
    trace.add_argument("--cp", type=at_least_one, default=1, metavar="N", help="ranks of a context group (default: 1)")
    trace.add_argument("--cp-method", choices=("ring", "all_to_all"), default="ring",
                       help="how context parallel attention exchanges (default: ring)")  # fmt: skip
    trace.add_argument("--micro-batch", type=at_least_one, metavar="N", help="sequences (default: 1)")
    trace.add_argument("--seq-len", dest="tokens", type=at_least_one, metavar="N",
                       help="tokens in a sequence (default: 4096, or what the model allows)")  # fmt: skip
    trace.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    trace.add_argument("--kernels", choices=("eager", "fused"), default="eager",
                       help="a kernel an operation, or chains of small ones joined (default: eager)")  # fmt: skip
    trace.set_defaults(run=_trace)
    from search.cli import diff, export, history, predict, refine, report, run, validate

    priced = command("predict", "predict step time and memory of one strategy, and where they come from",
                     "\n\n  piper-search predict --model llama9b --gpus 32 --global-batch 512 --pp 4\n"
                     "  piper-search predict piper-search-out/best.strategy.yaml --timeline step.html")  # fmt: skip
    predict.add_options(priced)
    priced.set_defaults(run=_predict)
    for name, module, what in (
        ("diff", diff, "say what differs between two strategies, and what that costs"),
        ("export", export, "write a strategy for another system, and say what that cannot express"),
        ("history", history, "show measured steps beside what was predicted of them"),
        ("refine", refine, "improve a strategy in all that is not locked"),
        ("report", report, "write one page about what a search found"),
        ("run", run, "train a strategy for some steps, or rehearse it where devices are too few"),
        ("validate", validate, "predict published measurements, and say how near that comes"),
    ):
        sub = command(name, what)
        module.add_options(sub)
        sub.set_defaults(run=module.run)
    command("models", "list the models that have a preset").set_defaults(run=_models)
    text = "list the clusters; piper-profile clusters says where each number comes from"
    command("clusters", text).set_defaults(run=_clusters)
    return made


def executed(text: str) -> int:
    """Read how many candidates to execute, 0 for none."""
    if text == "0":
        return 0
    try:
        return at_least_one(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"must be an integer of at least 1, or 0 for none, found {text[:40]!r}") from None


class _Commands(_SubParsersAction):  # type: ignore[type-arg]  # generic in its stub alone
    """Refuses options of the search before another command, such as ``--model x check FILE``: it would ignore them."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        for name in SEARCH_OPTIONS:
            if getattr(namespace, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is an option of the search, not of {parser.prog} {values[0]}")
        super().__call__(parser, namespace, values, option_string)


SEARCH_OPTIONS = (
    "model", "gpus", "fix", "forbid", "explain", "objective", "max_memory", "out", "resume", "workers", "budget",
    "execute", "profile", "address", *DEFAULTS,
)  # fmt: skip


class _Version(Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: Any, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('piper-search')}")
        parser.exit()


def _search(options: Namespace) -> int:
    if options.model is None or options.gpus is None:
        missing = "--model" if options.model is None else "--gpus"
        raise ConfigError(f"{missing} is missing; such as {EXAMPLE}, or see --help")
    from search.cli.run_search import run_search

    given = {
        name: default if (value := getattr(options, name)) is None else value for name, default in DEFAULTS.items()
    }
    if options.seq_len is None:
        given["seq_len"] = None  # or as many as the model allows
    if given["cluster"] == "cpu":
        given |= {name: value for name, value in CPU_DEFAULTS.items() if getattr(options, name) is None}
    return run_search(
        model=options.model, gpus=options.gpus, fix=options.fix or [], forbid=options.forbid or [], json=options.json,
        out=options.out, resume=options.resume, budget=options.budget, max_memory_gib=options.max_memory,
        objective=options.objective or "throughput", workers=options.workers,
        explain=options.explain or [], execute=options.execute, profile=options.profile, address=options.address,
        **given,
    )  # fmt: skip


def _check(options: Namespace) -> int:
    from search.cli.check import Wanted, check, watch

    wanted = Wanted(options.synthetic, options.stages, options.priced_on, options.against, options.plan)
    return (watch if options.watch else check)(options.file, wanted, as_json=options.json)


def _trace(options: Namespace) -> int:
    from search.cli.trace import trace

    return trace(
        options.traced, tp=options.tp, micro_batch=options.micro_batch, seq_len=options.tokens, dtype=options.dtype,
        kernels=options.kernels, as_json=options.json, sequence=options.sequence_parallel, ep=options.ep,
        cp=options.cp, method=options.cp_method,
    )  # fmt: skip


def _predict(options: Namespace) -> int:
    from search.cli.predict import run

    return run(options)


def _models(options: Namespace) -> int:
    from search.cli.show import show_models

    return show_models(as_json=options.json)


def _clusters(options: Namespace) -> int:
    from search.cli.show import show_clusters

    return show_clusters(as_json=options.json)
