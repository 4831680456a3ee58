"""Profiles made up for tests."""

from __future__ import annotations

from dataclasses import replace

from piper_core.arch.presets import preset
from piper_core.arch.record import Architecture
from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, Recompute, Region
from profiler.fingerprint import Conditions, Machine
from profiler.record import ChunkTime, Overlap, Profile, Run, Sample, Site, Transfer, UpdateTime
from profiler.store import model_digest

LLAMA = preset("tiny-llama")
MACHINE = Machine("cpu", "Test 1.2.3", 2, 1 << 34, "", "2.13.0", "gloo of torch 2.13.0", 1)
SEQ = 128
SECONDS = {Phase.F: 1e-3, Phase.B: 2e-3, Phase.BI: 1.1e-3, Phase.BW: 0.9e-3, Phase.R: 1e-3}
REGIONS = (Region.EMBED, Region.ATTENTION, Region.MLP, Region.HEAD)
ALPHA, BETA = 1e-4, 1e-9
WIDTHS = (1 << 10, 1 << 16, 1 << 22)


def around(seconds: float, doubt: float = 0.02) -> Sample:
    """Return ten times whose median is ``seconds``."""
    return Sample(tuple(seconds * (1 + doubt * (i - 4.5) / 4.5) for i in range(10)))


def profile(
    architecture: Architecture = LLAMA, *, micro_batch: tuple[int, ...] = (1, 2), tensor: tuple[int, ...] = (1,),
    scale: float = 1.0, doubt: float = 0.02, machine: Machine = MACHINE,
) -> Profile:  # fmt: skip
    """Return a profile in which a chunk takes ``scale`` x SECONDS x (0.5 + 0.5 b) / tp."""
    chunks, sites = {}, {}
    for region in REGIONS:
        for phase, seconds in SECONDS.items():
            if (region is Region.EMBED and phase is Phase.BI) or (
                region in (Region.EMBED, Region.HEAD) and phase is Phase.R
            ):
                continue
            for b in micro_batch:
                for tp in tensor:
                    policy = Recompute.FULL if phase is Phase.R else Recompute.NONE
                    site = Site(region, phase, b, SEQ, Degrees(tp), policy)
                    took = scale * seconds * (0.5 + 0.5 * b) / tp
                    digest = f"{region}{phase.name}{b}{tp}"
                    chunks[digest] = ChunkTime(around(took, doubt), 1000, 500)
                    sites[site] = digest
    transfers = tuple(
        Transfer(kind, 2, 1, size, around(scale * (ALPHA + BETA * size), doubt))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for size in WIDTHS
    )
    return Profile(
        machine, architecture.name, model_digest(architecture), "float32", chunks, sites, transfers,
        tuple(UpdateTime(n, around(scale * 1e-9 * n + 1e-5)) for n in (1 << 12, 1 << 20)),
        (Overlap("compute and compute", around(1.1)), Overlap("compute and transfer", around(1.5))),
        around(1e-7), (), (Conditions("2026-01-01T00:00:00+00:00", "abcd", 0.1, 2400.0),),
    )  # fmt: skip


def run(name: str, measured_s: float, predicted_s: float, when: int = 0, **features: float) -> Run:
    """Return a measured step."""
    return Run(name, name, f"2026-01-01T00:00:{when:02}+00:00", around(measured_s), predicted_s, features)


def bare(machine: Machine = MACHINE, **parts: object) -> Profile:
    """Return a profile with these parts alone."""
    empty = Profile(machine, LLAMA.name, model_digest(LLAMA), "float32")
    return replace(empty, **parts)  # type: ignore[arg-type]  # fields by name
