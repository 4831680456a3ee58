"""A person's own model: ``file.py:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from piper_core.errors import ConfigError
from piper_core.models.source import run_source

FORM = "file.py:function, such as model.py:build"


def load_model(text: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Call the function that ``text`` names, as ``file.py:function``; return its module and example inputs.

    The function takes nothing and returns (module, inputs): ``module(*inputs)`` is the loss, a scalar. Dimension 0 of
    every input is the batch. The file is run, with its folder importable.

    Raises:
        ConfigError: no such file or function, or it fails or returns something else.
    """
    name, colon, function = text.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(f"model {text[:200]!r} is not of the form {FORM}")
    if not path.is_file():
        raise ConfigError(f"model {text[:200]!r}: there is no file {name}")
    with _importable(path.resolve().parent):
        namespace = vars(_guarded(text, lambda: run_source(f"piper_user_{path.stem}", path)))
        build = namespace.get(function)
        if not callable(build):
            found = ", ".join(n for n, each in namespace.items() if callable(each) and not n.startswith("_"))
            raise ConfigError(f"{path} has no function {function!r}; it has {found[:200] or 'none'}")
        made = _guarded(text, build)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ConfigError(f"{text}: must return (module, inputs), found {type(made).__name__}")
    module, inputs = made
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, tuple | list) or not inputs or not all(isinstance(each, Tensor) for each in inputs):
        raise ConfigError(f"{text}: the inputs must be tensors, a tuple of at least one")
    if any(each.ndim == 0 for each in inputs):
        raise ConfigError(f"{text}: dimension 0 of every input is the batch, found a scalar")
    return module, tuple(inputs)


def _guarded(text: str, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; whatever it raises is one line, with the line of the person's file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        trace, line = error.__traceback__, ""
        file = str(Path(text.rpartition(":")[0]))
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.endswith(file):
                line = f", line {trace.tb_lineno}"
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.lineno:
            line = f", line {error.lineno}"
        raise ConfigError(f"{text}{line}: {type(error).__name__}: {str(error)[:300]}") from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
