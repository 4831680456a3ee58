"""Which machine a profile is of, told without torch, so that a search finds it at start-up."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep

from piper_core.errors import ConfigError

DEVICES = ("cpu", "cuda")
BUSY = 0.3
"""Runnable processes a core, beside our own, from which a host counts as busy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What makes times comparable: two profiles are of like machines when all of this is equal.

    ``threads`` is threads of compute a process; ``driver`` and ``backend`` are empty where there is none.
    """

    kind: str
    device: str
    count: int
    memory_bytes: int
    driver: str
    torch: str
    backend: str
    threads: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        extra = f", driver {self.driver}" if self.driver else f", {self.threads} threads a process"
        return f"{self.count} x {self.device}{extra}, torch {self.torch}, {self.backend}"

    def unlike(self, other: Machine) -> str:
        """Return in words what differs from another machine, "" for nothing."""
        names = Machine.__slots__
        pairs = zip(names, astuple(self), astuple(other), strict=True)
        return ", ".join(f"{name} {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How it was while a profile was taken: not part of what makes machines alike."""

    when: str
    host: str
    load: float
    clock_mhz: float

    @property
    def busy(self) -> bool:
        return self.load > BUSY


@lru_cache(maxsize=8)
def machine(kind: str, threads: int = 1) -> Machine:
    """Return what this machine is.

    Raises:
        ConfigError: no such device here.
    """
    if kind not in DEVICES:
        raise ConfigError(f"unknown device {kind[:40]!r}; devices are {', '.join(DEVICES)}")
    torch = _version("torch")
    if not torch:
        raise ConfigError("torch is not installed, and measuring needs it; install the package's dependencies")
    if kind == "cpu":
        return Machine("cpu", _processor(), _cores(), _memory(), "", torch, f"gloo of torch {torch}", threads)
    found = _gpus()
    if not found:
        raise ConfigError("no CUDA device here (nvidia-smi lists none); use --device cpu, or run where there is one")
    name, driver, memory = found[0]
    nccl = next((v for p in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := _version(p))), "of torch")
    return Machine("cuda", name, len(found), memory, driver, torch, f"NCCL {nccl}", threads)


def conditions(kind: str) -> Conditions:
    """Return how busy this host is now; ``load`` is runnable processes a core over the last minute."""
    try:
        load = os.getloadavg()[0] / _cores()
    except OSError:
        load = 0.0
    now = datetime.now(UTC).replace(microsecond=0).isoformat()
    return Conditions(now, hashlib.sha256(platform.node().encode()).hexdigest()[:8], round(load, 2), _clock(kind))


def busy_part(seconds: float = 0.3) -> float:
    """Return the part of this machine's cores that is busy while this process sleeps for so long; 0 where the system
    does not say."""
    before = _core_times()
    sleep(seconds)
    spent = [now - then for now, then in zip(_core_times(), before, strict=True)]
    return 1 - sum(spent[3:5]) / sum(spent) if sum(spent) > 0 else 0.0


def _core_times() -> list[int]:
    """Return the ticks of all cores together: user, nice, system, idle, waiting for disks, ..."""
    found = re.search(r"^cpu +(.+)$", _read("/proc/stat"), re.M)
    return [int(each) for each in found[1].split()[:8]] if found else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cores() -> int:
    """Cores that the machine has; a process that is held to fewer (taskset) is on the same machine still."""
    return os.cpu_count() or 1


def _processor() -> str:
    text = _read("/proc/cpuinfo")
    names = re.findall(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.M)
    fields = ("cpu family", "model", "stepping")
    codes = [code for each in fields for code in re.findall(rf"^{each}\s*:\s*(\d+)$", text, re.M)[:1]]
    return f"{names[0].strip() if names else platform.processor() or platform.machine()} {'.'.join(codes)}".strip()


def _memory() -> int:
    """Bytes of memory, to a quarter of a GiB: kernels take a little of it, not always the same."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    return round(int(found[1]) * 1024 / 2**28) * 2**28 if found else 0


def _clock(kind: str) -> float:
    if kind == "cuda":
        found = _smi("clocks.sm")
        return float(found[0][0]) if found and found[0][0].replace(".", "").isdigit() else 0.0
    found_mhz = re.search(r"^cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"), re.M)
    return round(float(found_mhz[1])) if found_mhz else 0.0


def _gpus() -> list[tuple[str, str, int]]:
    return [
        (row[0], row[1], int(row[2]) * 2**20) for row in _smi("name,driver_version,memory.total") if row[2].isdigit()
    ]


def gpus() -> int:
    """Return how many CUDA devices the driver lists, 0 where there is none."""
    return len(_gpus())


def _smi(query: str) -> list[list[str]]:
    """Return nvidia-smi's answer, a row a device; nothing where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == query.count(",") + 1] if done.returncode == 0 else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
