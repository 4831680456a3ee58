"""Hardware records: what a device and a cluster can do, read from JSON in which every number has a source."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from piper_core.errors import ConfigError

HARDWARE = Path(__file__).parent / "hardware"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    ``matmul_flops`` is the dense 16-bit peak in FLOP/s; the efficiencies are fractions of it, or of the
    memory bandwidth, that long kernels reach; ``memory_efficiency`` is that of copies and of sums into gradients,
    ``elementwise_efficiency`` that of the norms, activations and additions between matrix products.
    ``inner_overhead`` is the work that a matrix product adds to its inner dimension before it streams (prologue and
    epilogue, in elements). ``launch_s`` is the least time from one operation to the next in a program that is not
    compiled. ``context_bytes`` is taken before the first tensor.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    memory_efficiency: float
    elementwise_efficiency: float
    matmul_flops: float
    matmul_efficiency: float
    inner_overhead: float
    multiprocessors: float
    attention_efficiency: float
    attention_backward_efficiency: float
    launch_s: float
    context_bytes: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of ``gpus_per_node`` devices; rank r is on node r // gpus_per_node.

    Bytes/s are one way: ``link_bytes_per_s`` of one device inside a node, ``nic_bytes_per_s`` of one of
    ``nics_per_node``. Efficiencies are fractions that large messages reach. Latencies are for one hop;
    ``collective_latency_s`` is the fixed part of any collective. ``ramp_bytes`` is the size up to which
    collectives are far from full speed. ``oversubscription`` divides the network between nodes.
    """

    name: str
    device: Device
    gpus_per_node: int
    link_bytes_per_s: float
    link_efficiency: float
    link_latency_s: float
    nics_per_node: int
    nic_bytes_per_s: float
    network_efficiency: float
    network_latency_s: float
    oversubscription: float
    collective_latency_s: float
    ramp_bytes: float

    @property
    def node_bytes_per_s(self) -> float:
        """Bytes/s that leave one node at most, efficiency included."""
        return self.nics_per_node * self.nic_bytes_per_s * self.network_efficiency / self.oversubscription


_FRACTIONS = frozenset(
    field.name for record in (Device, Cluster) for field in fields(record) if field.name.endswith("_efficiency")
)
_MAY_BE_ZERO = frozenset({"context_bytes", "inner_overhead", "ramp_bytes"})
_WHOLE = frozenset({"gpus_per_node", "nics_per_node"})
_Record = TypeVar("_Record", Device, Cluster)


def cluster_ids() -> tuple[str, ...]:
    """Return the ids of the clusters that ship with the package."""
    return _ids("cluster")


def device_ids() -> tuple[str, ...]:
    """Return the ids of the devices that ship with the package."""
    return _ids("device")


@lru_cache(maxsize=64)
def load_cluster(name: str) -> Cluster:
    """Return the cluster with an id such as ``p4de``, or that a person's own ``*.json`` describes.

    A file's ``device`` is an id, or a device written out in place.

    Raises:
        ConfigError: unknown id, or a file with a missing, unknown, negative or non-finite entry.
    """
    data, where = _read(name, "cluster", cluster_ids())
    device = data.pop("device", None)
    if isinstance(device, str):
        record = load_device(device)
    elif isinstance(device, dict):
        record = _record(Device, dict(device), f"{where}, device")
    else:
        raise ConfigError(f"{where}: device must be an id or a device record; ids are {', '.join(device_ids())}")
    return _record(Cluster, data, where, device=record)


@lru_cache(maxsize=64)
def load_device(name: str) -> Device:
    """Return the device with an id such as ``a100-sxm-80gb``, or that a person's own ``*.json`` describes.

    Raises:
        ConfigError: as ``load_cluster``.
    """
    data, where = _read(name, "device", device_ids())
    return _record(Device, data, where)


def sources(name: str) -> dict[str, str]:
    """Return the source of each number of a cluster, and of its device (``device.`` before the field)."""
    load_cluster(name)  # refuses what is malformed
    data, _ = _read(name, "cluster", cluster_ids())
    device = data.get("device")
    inner = _read(device, "device", device_ids())[0] if isinstance(device, str) else device
    found = {field: entry["source"] for field, entry in data.items() if isinstance(entry, dict) and "source" in entry}
    for field, entry in (inner or {}).items():
        if isinstance(entry, dict):
            found[f"device.{field}"] = entry["source"]
    return found


def _ids(kind: str) -> tuple[str, ...]:
    ending = f".{kind}.json"
    return tuple(sorted(path.name.removesuffix(ending) for path in HARDWARE.glob(f"*{ending}")))


def _read(name: str, kind: str, known: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Return the JSON object called ``name`` and the words that say where it is."""
    own = name.endswith(".json")
    if not own and name not in known:
        near = [each for each in known if name and each.startswith(name.lower())]
        near = near or get_close_matches(name.lower(), known, n=3, cutoff=0.4) or list(known)
        raise ConfigError(f"unknown {kind} {name[:60]!r}; the nearest ids are {', '.join(near)}")
    path = Path(name) if own else HARDWARE / f"{name}.{kind}.json"
    where = f"{kind} file {path}" if own else f"{kind} {name}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{where}: larger than {MAX_FILE_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON, {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(data).__name__}")
    return data, where


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _record(record: type[_Record], data: dict[str, Any], where: str, **ready: Any) -> _Record:
    """Build ``record`` from ``{"field": {"value": number, "source": text}}`` and a plain ``name``."""
    values = dict(ready)
    wanted = [field.name for field in fields(record) if field.name not in ready]
    unknown = sorted(set(data) - set(wanted))
    missing = [name for name in wanted if name not in data]
    if missing or unknown:
        what = f"missing {', '.join(missing)}" if missing else f"unknown field {unknown[0]!r}"
        raise ConfigError(f"{where}: {what}; the fields are {', '.join(wanted)}")
    for name in wanted:
        values[name] = _name(data[name], where) if name == "name" else _number(name, data[name], where)
    return record(**values)


def _name(entry: Any, where: str) -> str:
    if not isinstance(entry, str) or not entry or len(entry) > 100 or not entry.isprintable():
        raise ConfigError(f"{where}: name must be text, one short line, found {str(entry)[:60]!r}")
    return entry


def _number(name: str, entry: Any, where: str) -> float | int:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
        raise ConfigError(f'{where}: {name} must be {{"value": number, "source": text}}, found {str(entry)[:60]!r}')
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or (value != 0 and not 1e-12 < abs(value) < 1e20):
        raise ConfigError(f"{where}: {name} must be a finite number between 1e-12 and 1e20, found {str(value)[:40]}")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ConfigError(f"{where}: {name} must be positive, found {value!r}")
    if name in _FRACTIONS and value > 1:
        raise ConfigError(f"{where}: {name} is a fraction of the peak and at most 1, found {value!r}")
    if name in _WHOLE:
        if value != int(value):
            raise ConfigError(f"{where}: {name} must be a whole number, found {value!r}")
        return int(value)
    return float(value)
