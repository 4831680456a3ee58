"""Profiles as tables: one, all of a store, two side by side."""

from __future__ import annotations

from functools import partial
from math import exp, log
from pathlib import Path

from piper_core.errors import ConfigError
from profiler import console
from profiler.form import to_data
from profiler.record import Profile, Sample
from profiler.store import folder, load, load_all, profiles


def listing(store: Path | None, *, as_json: bool) -> int:
    """List the profiles of a store.

    Raises:
        ConfigError: a store was named that is no folder.
    """
    if store is not None and not store.is_dir():
        what = "is a file; piper-profile show FILE shows one" if store.exists() else "is not there"
        raise ConfigError(f"--store {store} {what}; name a folder of profiles, or leave it out for {folder()}")
    rows = []
    for path, profile in load_all(profiles(store), partial(console.warn, "piper-profile")):
        when = max((each.when for each in profile.conditions), default="")
        rows.append((profile.model, str(profile.machine), profile.dtype, str(len(profile.chunks)), when, str(path)))
    header = ("model", "machine", "dtype", "chunks", "when", "file")
    if as_json:
        console.print_json([dict(zip(header, row, strict=True)) for row in rows])
    elif rows:
        print(console.table(header, rows))
    else:
        print(f"no profile in {store or folder()}; piper-profile --model NAME takes one")
    return 0


def show(path: Path, *, as_json: bool) -> int:
    """Print a profile."""
    profile = load(path)
    if as_json:
        console.print_json(to_data(profile))
        return 0
    print(f"{profile.model} in {profile.dtype} on {profile.machine}")
    for each in profile.conditions:
        print(f"taken {each.when}, load {each.load:g} a core, clock {each.clock_mhz:g} MHz")
    print()
    print(_chunks(profile))
    if profile.transfers:
        print("\n" + _transfers(profile))
    rows = [(f"update of {u.numel:,}", *_cells(u.sample)) for u in profile.updates]
    rows += [("dispatch", *_cells(profile.dispatch))] if profile.dispatch else []
    if rows:
        print("\n" + console.table(("step", "us", "low", "high", "times", "left out"), rows))
    for o in profile.overlaps:
        low, high = o.factors.interval_s
        print(f"{o.what} at once: {o.factors.median_s:.2f} of the longer alone ({low:.2f} to {high:.2f})")
    for m in profile.meetings:
        low, high = m.factors.interval_s
        print(
            f"compute of {m.compute_s * 1e3:.2g} ms before an exchange: {m.factors.median_s:.2f} of itself "
            f"({low:.2f} to {high:.2f})"
        )
    if profile.noisy:
        print(f"wide: {len(profile.noisy)} medians are uncertain by more than 10 %, such as {profile.noisy[0]}")
    return 0


def _chunks(profile: Profile) -> str:
    rows = []
    for site, each in sorted(profile.by_site.items(), key=lambda pair: str(pair[0])):
        cells = _cells(each.sample) if each.sample else (each.failed, "", "", "", "")
        rows.append((str(site), *cells, f"{each.peak_bytes / 2**20:.2f}", f"{each.saved_bytes / 2**20:.2f}"))
    return console.table(("chunk", "us", "low", "high", "times", "left out", "peak MiB", "saved MiB"), rows)


def _transfers(profile: Profile) -> str:
    rows = [
        (t.kind, str(t.ranks), f"{t.bytes:,}", *_cells(t.sample), f"{t.bytes / t.sample.median_s / 1e9:.2f}")
        for t in profile.transfers
    ]
    return console.table(("transfer", "ranks", "bytes", "us", "low", "high", "times", "left out", "GB/s"), rows)


def _cells(sample: Sample) -> tuple[str, ...]:
    low, high = sample.interval_s
    times = [f"{t * 1e6:.1f}" for t in (sample.median_s, low, high)]
    return (*times, str(len(sample.times_s)), str(sample.interrupted))


def compare(first: Path, second: Path, *, as_json: bool) -> int:
    """Print, for everything that both profiles have, how many times as long it takes in the second.

    Raises:
        ConfigError: nothing is in both.
    """
    a, b = load(first), load(second)
    pairs = [
        (str(site), x.sample, y.sample)
        for site, x in sorted(a.by_site.items(), key=lambda pair: str(pair[0]))
        if (y := b.by_site.get(site)) is not None and x.sample and y.sample
    ]
    others = {(t.kind, t.ranks, t.bytes): t.sample for t in b.transfers}
    pairs += [
        (f"{t.kind} {t.ranks} ranks {t.bytes} bytes", t.sample, others[t.kind, t.ranks, t.bytes])
        for t in a.transfers
        if (t.kind, t.ranks, t.bytes) in others
    ]
    if not pairs:
        raise ConfigError(f"{first} and {second} have nothing in common: {a.model} and {b.model}")
    ratios = [y.median_s / x.median_s for _, x, y in pairs]
    mean = exp(sum(map(log, ratios)) / len(ratios))
    apart = [_apart(x, y) for _, x, y in pairs]
    if as_json:
        keys = ("what", "first_s", "second_s", "ratio", "differs")
        rows = [
            dict(zip(keys, (name, x.median_s, y.median_s, ratio, far), strict=True))
            for (name, x, y), ratio, far in zip(pairs, ratios, apart, strict=True)
        ]
        console.print_json({"rows": rows, "geometric_mean": mean, "unlike": a.machine.unlike(b.machine)})
        return 0
    unlike = a.machine.unlike(b.machine)
    print(f"A {first}: {a.model} on {a.machine}\nB {second}: {b.model} on {b.machine}")
    print(f"unlike machines: {unlike}" if unlike else "like machines")
    table = [
        (name, f"{x.median_s * 1e6:.1f}", f"{y.median_s * 1e6:.1f}", f"{ratio:.3f}", "differs" if far else "")
        for (name, x, y), ratio, far in zip(pairs, ratios, apart, strict=True)
    ]
    print(console.table(("what", "A us", "B us", "B / A", ""), table))
    print(f"geometric mean of B / A: {mean:.3f}; {sum(apart)} of {len(pairs)} differ by more than their intervals")
    return 0


def _apart(x: Sample, y: Sample) -> bool:
    return x.interval_s[1] < y.interval_s[0] or y.interval_s[1] < x.interval_s[0]
