"""Values as Python source, a field a line, for files that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def literal(values: Mapping[str, Any]) -> str:
    """Return a dictionary as Python source."""
    lines = "".join(f"    {name!r}: {_value(value)},\n" for name, value in values.items())
    return "{\n" + lines.replace("'", '"') + "}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"        {item!r},\n" for item in value) + "    ]"
    return repr(value)
