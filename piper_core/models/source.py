"""Running a person's Python file as a module, as it is now."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType


class _AsWritten(SourceFileLoader):
    """Compiles the source itself: bytecode of a file that changed within a second, keeping its size, would be stale."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def run_source(name: str, path: Path) -> ModuleType:
    """Return the module that a file makes, entered as ``name`` (dataclasses and pickling look it up).

    Raises:
        ImportError: it is no Python file; and whatever the file raises.
    """
    spec = spec_from_file_location(name, path, loader=_AsWritten(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
