"""Load a person's model from ``file.py:function``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper_core.errors import ConfigError, PiperError
from piper_core.frontend.capture import fake, place_of
from piper_core.models.source import run_source


def load_function(path: Path, function: str, *, real: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return what ``function`` of the file returns: (model, example inputs).

    Unless ``real``, it is called where tensors have no memory, so that models of any size load; and once more for real
    if that fails.

    Raises:
        ConfigError: the file cannot be imported, has no such function, or it returns something else.
    """
    module = _imported(path)
    make = getattr(module, function, None)
    if not callable(make):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        here = [name for name in known if getattr(getattr(module, name), "__module__", "") == module.__name__]
        raise ConfigError(f"{path.name} has no function {function!r}; it has {', '.join(here[:8]) or 'none'}")
    for how in (nullcontext,) if real else (fake, nullcontext):
        try:
            with how():
                return _checked(make(), path, function)
        except PiperError:
            raise
        except (Exception, SystemExit) as error:
            if how is nullcontext:
                raise _failed(error, path, f"{function}()") from error
    raise AssertionError("the last try returns or raises")


def _imported(path: Path) -> Any:
    """Import a file under a name of its own; modules beside it can be imported from it."""
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return run_source(f"_piper_model_{path.stem}", path)
    except (Exception, SystemExit) as error:
        raise _failed(error, path, "importing it") from error
    finally:
        sys.path.remove(str(path.resolve().parent))


def _failed(error: BaseException, path: Path, what: str) -> ConfigError:
    where = place_of(error.__traceback__)
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or path).name}:{error.lineno}"
    return ConfigError(f"{path.name}: {what} fails at {where}: {type(error).__name__}: {str(error)[:200]}")


def _checked(made: Any, path: Path, function: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Check what a function returned."""
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module):
        inputs = made[1] if isinstance(made[1], tuple | list) else (made[1],)
        if inputs and all(isinstance(each, Tensor) for each in inputs):
            return made[0], tuple(inputs)
    found = type(made).__name__
    if isinstance(made, tuple | list):
        found += f" of {', '.join(type(each).__name__ for each in made[:4])}"
    raise ConfigError(
        f"{path.name}:{function} must return (model, example inputs), a torch.nn.Module and tensors; found {found}"
    )


def resized(inputs: Sequence[Tensor], batch: int) -> tuple[Tensor, ...]:
    """Return inputs like the ones given with another batch: dimension 0, where it is that of the first input."""
    given = inputs[0].shape[0] if inputs[0].dim() else None
    return tuple(
        torch.empty(
            (batch, *each.shape[1:]) if each.dim() and each.shape[0] == given else tuple(each.shape),
            dtype=each.dtype,
            device="meta",
            requires_grad=each.requires_grad,
        )
        for each in inputs
    )
