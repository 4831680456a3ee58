"""A profile as plain data and back, every number within the range that it can have. ``profiler/SCHEMA.md`` describes
the file.

Ranges are wide: they keep out what no clock or machine gives, by which fits and searches would divide, overflow or
never end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from piper_core.arch.contract import Method
from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, Recompute, Region
from profiler.entry import Entry, Range
from profiler.fingerprint import DEVICES, Conditions, Machine
from profiler.record import (
    DTYPES,
    TRANSFERS,
    ChunkTime,
    Meeting,
    Overlap,
    Profile,
    Run,
    Sample,
    Site,
    Transfer,
    UpdateTime,
)

SECONDS = Range(1e-9, 86400, whole=False)
"""A nanosecond to a day, for whatever is timed or predicted."""
FACTOR = Range(1e-6, 1e6, whole=False)
SHARE = Range(0, 2, whole=False)
"""Shares of a step; beyond 1, since exposed work of one step may reach into the next."""
BYTES, SOME_BYTES, ELEMENTS = Range(0, 2**60), Range(1, 2**60), Range(1, 2**60)
RANKS, GROUP, SEQUENCES, TOKENS = Range(1, 2**20), Range(2, 2**20), Range(1, 2**20), Range(1, 2**30)
COUNT, TIMES = Range(1, 2**20), Range(0, 2**40)
LOAD, MHZ = Range(0, 1e6, whole=False), Range(0, 1e6, whole=False)
PACE = Range(0, 3600, whole=False)
PHASES = {each.name: each for each in Phase if each is not Phase.NONE}
METHODS: dict[str, Method] = {each: each for each in get_args(Method)}


def to_data(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain data."""
    return {
        "machine": asdict(profile.machine),
        "model": {"name": profile.model, "digest": profile.model_digest},
        "dtype": profile.dtype,
        "chunks": {
            digest: {
                **_sample_data(each.sample), "peak_bytes": each.peak_bytes, "saved_bytes": each.saved_bytes,
                "failed": each.failed,
            }
            for digest, each in profile.chunks.items()
        },
        "sites": [_site_data(site) | {"chunk": digest} for site, digest in profile.sites.items()],
        "transfers": [
            {"kind": t.kind, "ranks": t.ranks, "nodes": t.nodes, "bytes": t.bytes, **_sample_data(t.sample)}
            for t in profile.transfers
        ],
        "updates": [{"numel": u.numel, **_sample_data(u.sample)} for u in profile.updates],
        "overlaps": [{"what": o.what, **_sample_data(o.factors)} for o in profile.overlaps],
        "dispatch": _sample_data(profile.dispatch),
        "meetings": [{"compute_s": _digits(m.compute_s), **_sample_data(m.factors)} for m in profile.meetings],
        "runs": [
            {
                "strategy": r.strategy, "digest": r.digest, "when": r.when, **_sample_data(r.step),
                "predicted_s": _digits(r.predicted_s), "features": {k: _digits(v) for k, v in r.features.items()},
            }
            for r in profile.runs
        ],
        "conditions": [asdict(each) for each in profile.conditions],
        "pace_s": _digits(profile.pace_s),
    }  # fmt: skip


def from_data(data: Mapping[str, Any], where: str = "profile") -> Profile:
    """Return the profile that :func:`to_data` wrote; ``where`` is how errors call it.

    Raises:
        ConfigError: a field is missing, of another kind, or out of its range; it is named, with what was expected.
    """
    entry = Entry.of(data, f"{where}: ")
    model, chunks = entry.inner("model"), entry.inner("chunks")
    made = Profile(
        machine=_machine(entry.inner("machine")),
        model=model.text("name"),
        model_digest=model.text("digest"),
        dtype=entry.text("dtype", DTYPES),
        chunks={digest: _chunk(chunks.inner(digest)) for digest in chunks.data},
        sites={_site(each): each.text("chunk") for each in entry.each("sites")},
        transfers=tuple(map(_transfer, entry.each("transfers"))),
        updates=tuple(UpdateTime(each.whole("numel", ELEMENTS), _sample(each)) for each in entry.each("updates")),
        overlaps=tuple(Overlap(each.text("what"), _sample(each, FACTOR)) for each in entry.each("overlaps")),
        dispatch=_maybe(entry.inner("dispatch")),
        meetings=tuple(
            Meeting(each.number("compute_s", SECONDS), _sample(each, FACTOR))
            for each in (entry.each("meetings") if "meetings" in data else ())  # older files lack them
        ),
        runs=tuple(map(_run, entry.each("runs"))),
        conditions=tuple(map(_conditions, entry.each("conditions"))),
        pace_s=entry.number("pace_s", PACE) if "pace_s" in data else 0.0,  # older files lack it
    )
    for site, digest in made.sites.items():
        if digest not in made.chunks:
            raise ConfigError(f"{where}: site {site} is of chunk {digest[:40]!r}, which it lacks; take it again")
    return made


def _sample_data(sample: Sample | None) -> dict[str, Any]:
    if sample is None:
        return {"times_s": None, "interrupted": 0}
    return {"times_s": [_digits(t) for t in sample.times_s], "interrupted": sample.interrupted}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _sample(entry: Entry, within: Range = SECONDS) -> Sample:
    return Sample(entry.numbers("times_s", within), entry.whole("interrupted", TIMES))


def _maybe(entry: Entry) -> Sample | None:
    return None if entry.get("times_s") is None else _sample(entry)


def _chunk(entry: Entry) -> ChunkTime:
    peak, saved = entry.whole("peak_bytes", BYTES), entry.whole("saved_bytes", BYTES)
    sample, failed = _maybe(entry), entry.text("failed")
    if (sample is None) != bool(failed):
        raise ConfigError(f"{entry.name} has either times_s or a reason why it failed; take it again")
    return ChunkTime(sample, peak, saved, failed)


def _transfer(entry: Entry) -> Transfer:
    ranks, nodes = entry.whole("ranks", GROUP), entry.whole("nodes", RANKS)
    return Transfer(entry.text("kind", TRANSFERS), ranks, nodes, entry.whole("bytes", SOME_BYTES), _sample(entry))


def _run(entry: Entry) -> Run:
    shares = entry.inner("features")
    return Run(
        entry.text("strategy"), entry.text("digest"), entry.text("when"), _sample(entry),
        entry.number("predicted_s", SECONDS), {name: shares.number(name, SHARE) for name in shares.data},
    )  # fmt: skip


def _machine(entry: Entry) -> Machine:
    entry.only([each.name for each in fields(Machine)])
    return Machine(
        kind=entry.text("kind", DEVICES), device=entry.text("device"), count=entry.whole("count", COUNT),
        memory_bytes=entry.whole("memory_bytes", BYTES), driver=entry.text("driver"), torch=entry.text("torch"),
        backend=entry.text("backend"), threads=entry.whole("threads", COUNT),
    )  # fmt: skip


def _conditions(entry: Entry) -> Conditions:
    entry.only([each.name for each in fields(Conditions)])
    return Conditions(
        entry.text("when"), entry.text("host"), entry.number("load", LOAD), entry.number("clock_mhz", MHZ)
    )


def _site_data(site: Site) -> dict[str, Any]:
    d = site.degrees
    return {
        "region": str(site.region), "phase": site.phase.name, "micro_batch": site.micro_batch,
        "seq_len": site.seq_len, "tensor": d.tensor, "sequence": d.sequence, "expert": d.expert, "context": d.context,
        "method": d.method, "policy": str(site.policy),
    }  # fmt: skip


def _site(entry: Entry) -> Site:
    degrees = Degrees(
        entry.whole("tensor", RANKS), entry.flag("sequence"), entry.whole("expert", RANKS),
        entry.whole("context", RANKS), METHODS[entry.text("method", METHODS)],
    )  # fmt: skip
    return Site(
        Region(entry.text("region", list(Region))), PHASES[entry.text("phase", PHASES)],
        entry.whole("micro_batch", SEQUENCES), entry.whole("seq_len", TOKENS), degrees,
        Recompute(entry.text("policy", list(Recompute))),
    )  # fmt: skip
