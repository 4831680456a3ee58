"""Moves of the degrees: for a program that the search's recipe makes, the same recipe with other degrees.

A program that a person has rearranged beyond the recipe (its order aside) has no such moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations

from piper_core.arch import load_architecture
from piper_core.directives import Order
from piper_core.errors import PiperError
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from search.export.job import Job
from search.generators.recipe import program_of
from search.refine.moves import Move
from search.space import OUTERS, Configuration, divisors

MIB = 1024 * 1024
AXES = ("pp", "tp", "dp", "cp")
LARGEST_FACTOR = 5
"""Primes that a move may shift from one degree to another: larger ones are whole jumps."""


def degree_moves(strategy: Strategy, compiled: Compiled) -> Iterator[Move]:
    """Yield a prime factor moved from one degree to another, other expert degrees, other numbers of virtual stages with
    their schedules, and the other order of the mesh."""
    job = _job(strategy, compiled)
    config = _configuration(job) if job is not None else None
    if job is None or config is None:
        return
    for near in _near(config, job):
        try:
            made = _strategy(job, near)
        except PiperError:  # a family that does not take these numbers
            continue
        if made is not None:
            yield Move(made, f"{_words(config)} became {_words(near)}")


def _job(strategy: Strategy, compiled: Compiled) -> Job | None:
    model = strategy.header.model
    if model is None or model.startswith(("dense:", "moe:")) or strategy.header.global_batch is None:
        return None
    return Job(strategy, compiled, load_architecture(model))


def _configuration(job: Job) -> Configuration | None:
    """Return the configuration whose recipe the program is, its order aside; None where there is none."""
    schedule = job.strategy.header.schedule
    plain = "interleaved_1f1b" if job.virtual_stages > 1 else "1f1b"
    name = {Layout.V: "zbv", Layout.BIDIRECTIONAL: "dualpipe"}.get(job.layout or Layout.LOOP, plain)
    if schedule is not None and schedule in FAMILIES:
        name = schedule
    try:
        found = Configuration(
            pp=job.pp, tp=job.tp, dp=job.dp, ep=job.ep, cp=job.cp, schedule=name, virtual_stages=job.virtual_stages,
            zero=job.zero, micro_batch=job.micro_batch, num_microbatches=job.microbatches,
            recompute=job.recompute[0] if len(set(job.recompute)) == 1 else "mixed",
            sequence_parallel=job.sequence_parallel, cuts="balanced",
        )  # fmt: skip
        for outer in OUTERS:
            config = replace(found, outer=outer)
            program, _ = program_of(config, job.layers, job.bucket_bytes // MIB)
            if _without_order(program) == _without_order(job.strategy.program):
                return config
    except (PiperError, ValueError):  # degrees that differ between stages; recompute of some layers
        return None
    return None


def _without_order(program: Program) -> list[object]:
    return [each.to_data() for each in program.ordered if not isinstance(each, Order)]


def _near(config: Configuration, job: Job) -> Iterator[Configuration]:
    degrees = {axis: getattr(config, axis) for axis in AXES}
    for source, target in permutations(AXES, 2):
        for factor in (2, 3, LARGEST_FACTOR):
            if degrees[source] % factor == 0:
                moved = {source: degrees[source] // factor, target: degrees[target] * factor}
                yield from _completed(replace(config, **moved), job)
    experts = job.architecture.experts if job.architecture else 0
    for ep in divisors(experts) if experts else ():
        if ep != config.ep and max(ep, config.ep) <= 2 * min(ep, config.ep):
            yield from _completed(replace(config, ep=ep), job)
    for name, family in FAMILIES.items():
        if config.pp > 1 and config.pp in family.degrees():
            for v in islice(family.virtual_stages(config.pp), 4):
                if v != config.virtual_stages:
                    yield from _completed(replace(config, schedule=name, virtual_stages=v), job)
    yield from (replace(config, outer=outer) for outer in OUTERS if outer != config.outer)


def _completed(config: Configuration, job: Job) -> Iterator[Configuration]:
    """Yield the configuration with a batch, a schedule and shardings that go with its degrees."""
    if job.global_batch % config.dp or config.dp % config.ep:
        return
    share = job.global_batch // config.dp
    b = max(size for size in divisors(share) if size <= config.micro_batch)
    config = replace(config, micro_batch=b, num_microbatches=share // b)
    if config.tp == 1:
        config = replace(config, sequence_parallel=False)
    elif job.tp == 1:
        config = replace(config, sequence_parallel=job.seq_len % config.tp == 0)
    if config.dp * config.cp == 1:
        config = replace(config, zero=0)
    family, pp, v = FAMILIES[config.schedule], config.pp, config.virtual_stages
    if pp == 1 or pp not in family.degrees() or v not in family.virtual_stages(pp):
        config = replace(config, schedule="1f1b", virtual_stages=1)
    if config.num_microbatches in FAMILIES[config.schedule].microbatches(config.pp, config.virtual_stages):
        yield config


def _strategy(job: Job, config: Configuration) -> Strategy | None:
    """Return the strategy of a configuration, its layers spread evenly; None where stages outnumber layers."""
    layers, stages = sum(job.layers), config.stages
    if stages > layers:
        return None
    same = stages == job.stages
    counts = job.layers if same else tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    program, mesh = program_of(config, counts, job.bucket_bytes // MIB)
    header = replace(
        job.strategy.header, mesh=mesh, gpus=mesh.size, schedule=config.schedule,
        micro_batch=config.micro_batch if job.strategy.header.micro_batch is not None else None,
    )  # fmt: skip
    return Strategy(header, program)


def _words(config: Configuration) -> str:
    degrees = " ".join(f"{axis}={getattr(config, axis)}" for axis in (*AXES, "ep") if getattr(config, axis) > 1)
    outer = f" outer={config.outer}" if config.outer != OUTERS[0] else ""
    return f"{degrees or 'one GPU'} {config.schedule} v={config.virtual_stages} b={config.micro_batch}{outer}"
