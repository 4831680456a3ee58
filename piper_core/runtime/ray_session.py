"""A Ray cluster for the time of a run: one that is there already, or one of this machine's own that leaves nothing
behind."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from piper_core.errors import ConfigError

_PREFIX = "piper-ray-"
_STORE_BYTES = 256 * 2**20
"""Of the object store, through which batches and answers pass."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
}
"""What Ray's processes are told by the environment: no reports to anyone, no warning that this is a CPU machine."""
_END_S, _LEFT_S = 15.0, 2.0
"""How long Ray may take to end, and without its head, which it would wait for."""


class RaySession:
    """A connection to Ray. ``own`` says that its processes were started here, and end with it."""

    def __init__(self, address: str | None, ranks: int) -> None:
        """Connect to the cluster at ``address``, to the one that this process is connected to, or start one.

        Raises:
            ConfigError: Ray is not installed, or nothing answers at the address.
        """
        self.own, self.address, self._processes = False, "", list[int]()
        _sweep()
        root = tempfile.gettempdir()
        root = root if len(root) <= 24 else "/tmp"  # sockets in it have names of at most 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        # Registered before Ray's own exit, it comes after that, which may still write.
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError("real ranks need ray: make setup installs it") from None
        self._connected = ray.is_initialized()
        try:
            self._connect(address, ranks)
        except BaseException:
            self.close()
            raise
        self.address = ray.get_runtime_context().gcs_address

    def _connect(self, address: str | None, ranks: int) -> None:
        if self._connected:
            return
        import ray

        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        ray._private.worker._worker_logs_enabled = False  # else news of dead workers are printed to stdout
        if address is None:
            self._start(ranks)
        else:
            self._join(address)

    def _start(self, ranks: int) -> None:
        import ray

        self.own = True
        ray.init(
            address="local", num_cpus=max(ranks, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False,
            logging_level=logging.CRITICAL, _temp_dir=str(self.folder), object_store_memory=_STORE_BYTES,
        )  # fmt: skip
        self._processes = _children()

    def _join(self, address: str) -> None:
        import ray

        plain = address.removeprefix("ray://")
        if address != "auto" and not answers(plain):
            raise ConfigError(f"--address {address[:100]}: no Ray head answers there; ray start --head starts one")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--address {address[:100]}: {' '.join(str(error).split())[:200]}") from None

    def alive(self) -> bool:
        """Say whether the head is there."""
        return answers(self.address)

    def close(self) -> None:
        """Leave the cluster; of one's own, end every process and remove every file, whatever state they are in."""
        import ray

        started = [*self._processes, *(naming(self.folder) if self.own else [])]  # those of an init that did not end
        ours = [*started, *below(started)]  # workers, agents: without Ray's own they would linger
        if not self._connected:
            _bounded(ray.shutdown, _END_S if not self._processes or self.alive() else _LEFT_S)
        end(ours)
        if self.own:
            end(naming(self.folder))  # what one of them started meanwhile
        self._processes = []
        for _ in range(20):  # a log may be written while its folder goes
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                break
            time.sleep(0.1)


def answers(address: str) -> bool:
    """Say whether something listens at ``host:port``."""
    name, _, port = address.rpartition(":")
    try:
        with socket.create_connection((name.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


def end(processes: Sequence[int]) -> None:
    """Kill processes and wait until they are gone, stopped ones too."""
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5.0
    for pid in processes:
        while _runs(pid) and time.monotonic() < until:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)


def naming(folder: Path) -> list[int]:
    """Return all processes whose command names a folder, this one aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it may have ended
            if os.fsencode(folder) in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def below(processes: Sequence[int]) -> list[int]:
    """Return all processes that some have started, and those that these have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):  # it may have ended
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, left = list[int](), list(processes)
    while left:
        mine = children.get(left.pop(), [])
        found += mine
        left += mine
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _children() -> list[int]:
    """Return the processes that Ray has started for this one."""
    import ray

    node: Any = ray._private.worker._global_node
    return [info.process.pid for each in node.all_processes.values() for info in each] if node is not None else []


def _bounded(call: Any, seconds: float) -> None:
    """Run something that may hang, for so long at most."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _sweep() -> None:
    """Remove folders of runs whose process was killed before it could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
