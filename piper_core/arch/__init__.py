"""Architectures without torch: records, presets, closed-form chunk tables.

``contract`` (shard contracts) and ``synthetic`` (synthetic models) are modules, imported by their full name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_core.arch.chunk import Chunk, Matmul, ModelChunks, Parameter, Saved, Work
    from piper_core.arch.closed_form import model_chunks
    from piper_core.arch.huggingface import load_architecture
    from piper_core.arch.presets import PRESETS, preset
    from piper_core.arch.record import Architecture, RopeScaling

_HOME = {
    "Architecture": "record",
    "Chunk": "chunk",
    "Matmul": "chunk",
    "ModelChunks": "chunk",
    "PRESETS": "presets",
    "Parameter": "chunk",
    "RopeScaling": "record",
    "Saved": "chunk",
    "Work": "chunk",
    "load_architecture": "huggingface",
    "model_chunks": "closed_form",
    "preset": "presets",
}
__all__ = [  # noqa: RUF022  # by kind
    "Architecture", "PRESETS", "RopeScaling", "load_architecture", "preset",
    "Chunk", "Matmul", "ModelChunks", "Parameter", "Saved", "Work", "model_chunks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
