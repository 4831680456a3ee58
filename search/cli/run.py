"""``piper-search run``: train a strategy for some steps on real ranks, or rehearse it where devices are too few."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from piper_core.errors import ConfigError, RunError
from profiler import console
from profiler.console import Parser, at_least_one, duration_s, path, seed

if TYPE_CHECKING:
    from piper_core.arch.record import Architecture
    from piper_core.program.strategy import Strategy
    from piper_core.runtime.data import Batches
    from piper_core.runtime.trainer import Step
    from search.predict import Prediction

LEAST_KEPT = 3
"""Timed steps from which a run counts as a measurement."""
NOT_REHEARSED = ("data", "load", "save", "timeline", "address", "dtype", "lr", "clip", "compile", "timeout")
"""Options of what a rehearsal does not do; what they say would be lost without a word."""
TRAINED = {"steps": 5, "lr": 1e-3, "seed": 0, "timeout": 60.0}
"""What an option is where it is not given; a rehearsal must know whether one was."""
TORCH = "run needs torch and ray: make setup installs them"


def add_options(parser: Parser) -> None:
    """Add the options of the command; their destinations begin with ``run_``, apart from those of the search."""

    def option(flag: str, text: str, **more: object) -> None:
        more = {"dest": f"run_{flag.replace('-', '_')}"} | more
        parser.add_argument(f"--{flag}", help=text, **more)  # type: ignore[arg-type]  # argparse's own overloads

    parser.add_argument("run_file", type=path, metavar="FILE", help="a strategy file")
    option("steps", "steps to train (default: 5; of a rehearsal 2)", type=at_least_one, metavar="N")
    option("ranks", "real: a process each; virtual: rehearse in one process, in float64 on tokens of its own; "
           " auto (default): real where there are enough devices",
           choices=("auto", "real", "virtual"), default="auto")  # fmt: skip
    option("device", "default: the kind of the strategy's cluster", choices=("cpu", "cuda"))
    option("address", "a Ray cluster that runs (host:port, or auto); default: processes of this machine", metavar="RAY")
    option("data", "tokens to train on, .npy or .bin (default: random ones)", type=path, metavar="FILE")
    option(
        "dtype",
        "of weights (default: float32, on cuda bfloat16, with --check float64)",
        choices=("float32", "float64", "bfloat16"),
    )
    option("lr", "learning rate of AdamW (default: 0.001)", type=_positive, metavar="X")
    option("clip", "largest norm of a gradient (default: none)", type=_positive, metavar="X")
    option("seed", "of weights and random tokens (default: 0)", type=seed, metavar="N")
    option("compile", "let Inductor compile the chunks of every rank before the first step", action="store_true")
    option("check", "compare losses and gradients with one process that trains the whole model", action="store_true")
    option("load", "go on from the checkpoint in a folder", type=path, metavar="DIR")
    option("save", "write a checkpoint to a folder in the end", type=path, metavar="DIR")
    option("timeline", "write the last step, predicted and measured (.html), or measured (.svg, .json)", type=path,
           metavar="FILE")  # fmt: skip
    option("timeout", "longest time for a step (default: 60)", type=duration_s, metavar="SECONDS")


def _positive(text: str) -> float:
    """Read a number above 0."""
    from argparse import ArgumentTypeError

    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ArgumentTypeError(f"must be a number above 0, found {text[:40]!r}")
    return value


def run(options: Namespace) -> int:
    """Train or rehearse, and print; return the exit status.

    Raises:
        ConfigError: what is asked for cannot be run here; PlanError: a plan that would not run, before anything has
            started; RunError: the run ended early, or did not compute what one process computes.
    """
    from piper_core.program.strategy import load
    from search.cli.timeline import check_target
    from search.execute import device_of, enough
    from search.header import check_header

    if options.run_timeline is not None:
        check_target(options.run_timeline)
        if options.run_steps == 1:
            raise ConfigError("--timeline needs two steps or more: in the first, memory is followed")
    strategy = load(options.run_file)
    check_header(strategy.header)
    architecture = _architecture(strategy)
    device = options.run_device or device_of(strategy)
    ranks = _ranks(strategy)
    try:
        virtual = options.run_ranks == "virtual"
        few = (
            not virtual
            and not options.run_address
            and not enough(ranks, device, strategy, named=options.run_device is not None)
        )
        if virtual or (options.run_ranks == "auto" and few):
            why = f"this machine has fewer {device} devices than its {ranks} ranks" if few else "as asked for"
            return _rehearse(strategy, architecture, why, options)
        for name, value in TRAINED.items():
            if getattr(options, f"run_{name}") is None:
                setattr(options, f"run_{name}", value)
        return _train(strategy, architecture, device, options)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "ray"):
            raise
        raise ConfigError(TORCH) from None


def _architecture(strategy: Strategy) -> Architecture:
    from piper_core.arch.huggingface import load_architecture

    model = strategy.header.model
    if model is None or model.startswith(("dense:", "moe:")):
        raise ConfigError(f"model {model or 'none'} has no weights to train; give the header a preset or a config.json")
    architecture = load_architecture(model)
    strategy.header.length(architecture)
    return architecture


def _ranks(strategy: Strategy) -> int:
    from piper_core.directives import Place

    placed = {rank for each in strategy.program.directives if isinstance(each, Place) for rank in each.devices}
    return len(placed) or 1


def _rehearse(strategy: Strategy, architecture: Architecture, why: str, options: Namespace) -> int:
    on_cuda = options.run_ranks == "virtual" and options.run_device == "cuda"
    for name in (*NOT_REHEARSED, *(["device"] if on_cuda else [])):
        if getattr(options, f"run_{name}") not in (None, False):
            raise ConfigError(f"--{name} has no place in a rehearsal ({why}), which trains a small double in float64 "
                              "on tokens of its own and keeps nothing; leave it out, or use --ranks real")  # fmt: skip
    from piper_core.program.strategy import base_dag
    from piper_core.runtime import rehearsal
    from piper_core.schedule.compile import compile_program

    compile_program(strategy.program, base_dag(strategy), strategy.header.world)  # a double is made to fit
    seed = 0 if options.run_seed is None else options.run_seed
    found = rehearsal.rehearse(strategy, architecture, steps=options.run_steps or rehearsal.STEPS, seed=seed)
    if options.json:
        console.print_json({"mode": "rehearsal", "why": why, **found.to_data()})
    else:
        print(f"rehearsal ({why}; --ranks real runs it anyway)")
        print(found)
    return 0


def _train(strategy: Strategy, architecture: Architecture, device: str, options: Namespace) -> int:
    from piper_core.runtime.checkpoint import check_target
    from piper_core.runtime.compare import OneProcess
    from piper_core.runtime.optimizer import AdamW, Clip
    from piper_core.runtime.trainer import Trainer
    from search.cli.run_report import data_of, not_compared, plain, show, write
    from search.history import profile_of

    clip = None if options.run_clip is None else Clip(options.run_clip)
    if options.run_save is not None:
        check_target(options.run_save.resolve())
    usual = "float64" if options.run_check else "bfloat16" if device == "cuda" else "float32"
    dtype = options.run_dtype or usual
    if options.run_check and options.run_load is not None:
        raise ConfigError("--check compares with a run from the beginning; leave --load out")
    profile = None if options.run_address else profile_of(strategy, architecture, device, dtype)
    apart = not_compared(dtype, compiled=options.run_compile, profile=profile)
    predicted = None if apart else _predicted(strategy, profile)
    batches = _batches(strategy, architecture, options)
    with Trainer(
        architecture, strategy, AdamW(options.run_lr), clip=clip, device="cuda" if device == "cuda" else "cpu",
        address=options.run_address, dtype=dtype, seed=options.run_seed, timeout_s=options.run_timeout,
        compiler="inductor" if options.run_compile else "none",
    ) as trainer:  # fmt: skip
        if options.run_load is not None:
            trainer.load(options.run_load)
        quiet: bool = options.json
        said = ", compiled" if options.run_compile else ""
        _say(quiet, f"{architecture.name} on {trainer.ranks} {device} ranks, global batch {trainer.slicing.batch}, "
                    f"sequence {trainer.seq_len}, {dtype}{said}; started in {trainer.start_s:.1f} s")  # fmt: skip
        check = OneProcess(trainer.source, trainer.slicing, trainer.training) if options.run_check else None
        steps, differ = [], []
        for turn in range(options.run_steps):
            number, batch = trainer.steps, batches(trainer.steps)
            loss = trainer.step(batch, "memory" if turn == 0 else "time")
            assert trainer.last is not None, "a step has been taken"
            steps.append(trainer.last)
            more = ""
            if check is not None:
                differ.append(check.step(batch, loss, trainer.whole("gradient")))
                more = f"  loss differs by {differ[-1].loss:.0e}, gradients by {differ[-1].gradient:.0e}"
            what = "memory followed" if turn == 0 else f"{trainer.last.seconds:.4f} s"
            _say(quiet, f"step {number}  loss {loss:.6f}  {what}{more}")
        saved = trainer.save(options.run_save) if options.run_save is not None else None
    kept = None if options.run_compile else _keep(strategy, profile, steps)
    data = data_of(steps, predicted) | {
        "compiled": bool(options.run_compile),
        "not_compared": apart,
        "predicted_by": None if profile is None or apart else str(profile),
        "kept_in": None if kept is None else str(kept),
        "check": [plain(each) for each in differ],
        "checkpoint": str(saved or "") or None,
    }
    if options.run_timeline is not None:
        schedule, mesh = strategy.header.schedule, strategy.header.mesh
        title = " ".join(str(each) for each in (architecture.name, schedule, mesh, f"on {device}") if each)
        write(options.run_timeline, title, steps[-1], predicted)
    if quiet:
        console.print_json(data)
    else:
        show(data, steps, options)
    bad = next((each for each in differ if not each.equal), None)
    if bad is not None:
        raise RunError(
            f"not what one process computes: the loss differs by {bad.loss:.1e}, the gradient of {bad.name} by "
            f"{bad.gradient:.1e} of its size; rounding explains {bad.limit:.0e}"
        )
    return 0


def _predicted(strategy: Strategy, profile: Path | None) -> Prediction | None:
    """Predict by this machine's profile of the model, else by what the header says, else by the cluster's record."""
    from search.pricing import Pricing, predict_as_said

    if strategy.header.cluster is None:
        return None
    return predict_as_said(strategy) if profile is None else Pricing.of(profile).predict(strategy)


def _keep(strategy: Strategy, profile: Path | None, steps: list[Step]) -> Path | None:
    """Add the timed steps to this machine's profile of the model, where there is one and the machine is quiet."""
    from profiler.fingerprint import BUSY, busy_part
    from profiler.record import Sample
    from search.history import remember

    timed = tuple(step.seconds for step in steps[1:])
    if profile is None or len(timed) < LEAST_KEPT or busy_part() > BUSY:
        return None
    remember(strategy, profile, Sample(timed))
    return profile


def _batches(strategy: Strategy, architecture: Architecture, options: Namespace) -> Batches:
    """Return the batches of the run, before it starts: what cannot be loaded, and tokens that it cannot train on, are
    refused here."""
    from piper_core.runtime.checkpoint import check_parts, find
    from piper_core.runtime.data import from_file, synthetic
    from piper_core.runtime.lowering import slicing_of
    from piper_core.runtime.optimizer import AdamW
    from piper_core.runtime.trainer import about, prepared

    first = 0
    if options.run_load is not None:
        found, first = find(options.run_load.resolve(), about(architecture, AdamW()))
        check_parts(found)
    size, length = slicing_of(prepared(architecture, strategy)[0]).batch, strategy.header.length(architecture)
    if options.run_data is None:
        return synthetic(size, length, architecture.vocab, options.run_seed)
    return from_file(options.run_data, size, length, architecture.vocab, range(first, first + options.run_steps))


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)
