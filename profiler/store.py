"""Profiles on disk: one JSON file for each (machine, model, dtype), written aside and renamed.

A reader sees the file before a write or after it, never between. Writers of one file take turns by a lock beside it,
and each joins what it adds to what is there, so that two that measure at once lose nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import NamedTemporaryFile

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from profiler.fingerprint import Machine
from profiler.form import from_data, to_data
from profiler.record import Profile

FORMAT = "piper-profile"
VERSION = 1
MAX_FILE_BYTES = 64 << 20
ENDING = ".profile.json"


def model_digest(architecture: Architecture) -> str:
    """Return a hash of all numbers of an architecture, its name and notes aside."""
    text = repr(astuple(architecture)[1:-1])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder() -> Path:
    """Return where profiles are kept: ``$PIPER_PROFILES``, else under ``$XDG_DATA_HOME`` or ~/.local/share."""
    named = os.environ.get("PIPER_PROFILES")
    if named:
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "piper-search" / "profiles"


def place(machine: Machine, model: str, digest: str, dtype: str, root: Path | None = None) -> Path:
    """Return the file of a model on a machine, whether it is there or not."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:60]
    return (root or folder()) / machine.digest / f"{name}.{digest}.{dtype}{ENDING}"


def find(architecture: Architecture, machine: Machine, dtype: str, root: Path | None = None) -> Path | None:
    """Return the profile of a model on this very machine, if one has been taken."""
    path = place(machine, architecture.name, model_digest(architecture), dtype, root)
    return path if path.exists() else None


def taken(architecture: Architecture, dtype: str, root: Path | None = None) -> bool:
    """Say whether the store has a profile of a model on any machine."""
    return next((root or folder()).glob(f"*/*.{model_digest(architecture)}.{dtype}{ENDING}"), None) is not None


def profiles(root: Path | None = None) -> list[Path]:
    """Return all profiles of a store, sorted."""
    return sorted((root or folder()).glob(f"*/*{ENDING}"))


def load_all(paths: Iterable[Path], warn: Callable[[str], object]) -> Iterator[tuple[Path, Profile]]:
    """Yield the profiles in files; of one that cannot be read, ``warn`` is told why, and the others count."""
    for path in paths:
        try:
            yield path, load(path)
        except ConfigError as error:
            warn(f"left out: {error}")


def check_writable(path: Path) -> None:
    """Refuse a place where no profile can be kept, before anything is measured for it.

    Raises:
        ConfigError: its folder cannot be made or written to.
    """
    with _turn(path):
        if not os.access(path.parent, os.W_OK):  # an older lock may be open to all
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def load(path: Path) -> Profile:
    """Return the profile in a file.

    Raises:
        ConfigError: no such file, another format or version, not whole, or a number out of its range.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"profile {path}: larger than {MAX_FILE_BYTES >> 20} MiB, so it is none of ours")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"profile {path}: {error.strerror or error}; piper-profile show lists those there are"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"profile {path}: not whole JSON; take it again, or import a copy") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f'profile {path}: not a profile, expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ConfigError(
            f"profile {path}: version {str(data.get('version'))[:20]}, and this program reads version {VERSION}; "
            "take it again"
        )
    made = from_data(data, f"profile {path}")
    if data.get("sum") != _sum(data):
        raise ConfigError(f"profile {path}: its check sum is wrong, so it was changed; take it again, or import a copy")
    return made


def save(profile: Profile, path: Path) -> None:
    """Write a profile over what is there, whole or not at all.

    Raises:
        ConfigError: the folder cannot be written to, or :func:`load` would refuse what was written.
    """
    data = {"format": FORMAT, "version": VERSION, **to_data(profile)}
    from_data(data, f"to be written to {path}")
    data["sum"] = _sum(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(
            "w", dir=path.parent, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump(data, file, indent=None, separators=(",", ":"))
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _unwritable(path, error) from None


def add(profile: Profile, path: Path) -> Profile:
    """Join a profile to the one in a file, and return both together.

    Raises:
        ConfigError: that one is of another machine, model or dtype, or cannot be read; the file stays as it was.
    """
    with _turn(path):
        joined = merged(load(path), profile, f"profile {path}") if path.exists() else profile
        save(joined, path)
    return joined


def merged(old: Profile, new: Profile, where: str) -> Profile:
    """Return two profiles together; of what both have, the new one counts.

    Raises:
        ConfigError: of unlike machines, models or dtypes.
    """
    unlike = old.machine.unlike(new.machine)
    if unlike:
        raise ConfigError(f"{where} is of another machine: {unlike}; keep them in two files")
    check_model(old, new.model, new.model_digest, where)
    if old.dtype != new.dtype:
        raise ConfigError(f"{where} is of {old.dtype}, not of {new.dtype}; keep them in two files")
    return old.merged(new)


def check_model(profile: Profile, model: str, digest: str, where: str) -> None:
    """Reject a profile of another model.

    Raises:
        ConfigError: it is.
    """
    if profile.model_digest != digest:
        same = " by another definition" if profile.model == model else ""
        raise ConfigError(
            f"{where} is of model {profile.model}{same}, not of {model}; take one with piper-profile --model {model}"
        )


def import_file(source: Path, root: Path | None = None) -> Path:
    """Bring a profile that was taken elsewhere into the store; return its place there.

    Raises:
        ConfigError: as :func:`load` and :func:`add`.
    """
    profile = load(source)
    target = place(profile.machine, profile.model, profile.model_digest, profile.dtype, root)
    add(profile, target)
    return target


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock of a file; it is let go of when the process ends, however it does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    inside = isinstance(error, FileExistsError | NotADirectoryError)
    why = "a file is where its folder would be" if inside else error.strerror or error
    return ConfigError(
        f"profile {path}: cannot be written: {why}; name a folder that can, by PIPER_PROFILES in "
        "the environment or --store of piper-profile"
    )


def _sum(data: dict[str, object]) -> str:
    text = json.dumps({k: v for k, v in data.items() if k != "sum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
