"""Run a function in a fresh process: what a trace needs that would change this one (a default process group)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from piper_core.errors import PiperError

Result = TypeVar("Result")


def apart(function: Callable[..., Result], *args: object, timeout_s: float = 600.0) -> Result:
    """Return ``function(*args)``, computed in a process of its own; both ends are pickled.

    Raises:
        PiperError: what the function raised of our errors, or that the process died or took too long.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((function, args)),
            capture_output=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PiperError(f"{function.__name__} took over {timeout_s:.0f} s in a process of its own") from None
    if done.returncode or not done.stdout:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise PiperError(f"{function.__name__} failed in a process of its own: {last[0][:300]}")
    result = pickle.loads(done.stdout)
    if isinstance(result, PiperError):
        raise result
    return result  # type: ignore[no-any-return]  # pickled by our own process


def _main() -> None:
    """Answer one call: standard input to standard output; prints go to standard error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, args = pickle.load(sys.stdin.buffer)
    try:
        result = function(*args)
    except PiperError as error:
        result = error
    with answer:
        pickle.dump(result, answer)


if __name__ == "__main__":
    _main()
