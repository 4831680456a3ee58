"""Exporters: a strategy as files of other systems. ``EXPORTERS`` maps each ``--to`` to its module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from search.export.base import Exporter

EXPORTERS = {
    "piper": "upstream",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "perfetto": "perfetto",
    "csv": "pipeline_csv",
}
"""Target -> module of this package whose ``export`` is the exporter."""


def exporter(target: str) -> Exporter:
    """Return the exporter of a target in ``EXPORTERS``."""
    found: Exporter = import_module(f"search.export.{EXPORTERS[target]}").export
    return found
