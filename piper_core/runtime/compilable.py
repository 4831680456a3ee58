"""Whether Inductor can compile a run's chunks, asked before any process is started."""

from __future__ import annotations

from typing import get_args

from piper_core.errors import ConfigError
from piper_core.frontend.run import ROWS_VARY, Compiler
from piper_core.runtime.model import ArchitectureSource, ModelSource


def check(compiler: Compiler, source: ModelSource, *, local: bool) -> None:
    """Refuse what could not be compiled; ``local``: ranks compile for the CPU of this machine.

    Raises:
        ConfigError: no such compiler, experts that ranks divide, or no C++ compiler for Inductor.
    """
    if compiler not in get_args(Compiler):
        raise ConfigError(f"compiler must be {' or '.join(get_args(Compiler))}, found {str(compiler)[:40]!r}")
    if compiler == "none":
        return
    if isinstance(source, ArchitectureSource) and source.architecture.experts and source.degrees.expert > 1:
        raise ConfigError(ROWS_VARY)
    if local:
        _check_cxx()


def _check_cxx() -> None:
    """Relies on ``torch._inductor.cpp_builder.get_cpp_compiler``, which Inductor asks for its compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "Inductor found no C++ compiler on this machine; install g++, name one in CXX, or leave --compile out "
            "(in Python: compiler 'none')"
        ) from None
