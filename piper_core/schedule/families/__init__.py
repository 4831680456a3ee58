"""Schedule families by name. A family's module is imported when the family is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module

from piper_core.errors import ConfigError
from piper_core.schedule.families.base import Family

__all__ = ["FAMILIES", "Family", "get_family"]

_MODULES = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved_1f1b": "interleaved_1f1b",
    "zb_h1": "zb_h1",
    "zb_h2": "zb_h2",
    "zbv": "zbv",
    "v_half": "v_half",
    "v_min": "v_min",
    "dualpipev": "dualpipev",
    "dualpipe": "dualpipe",
}


class _Registry(Mapping[str, Family]):
    """Every family by name; iterating names imports none of them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        if name not in self._loaded:
            module = import_module(f"{__name__}.{_MODULES[name]}")
            family: Family = module.FAMILY
            self._loaded[name] = family
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


FAMILIES: Mapping[str, Family] = _Registry()


def get_family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        ConfigError: there is none; says which names are near.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    near = get_close_matches(name.lower().replace("-", "_"), _MODULES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_MODULES)}"
    raise ConfigError(f"no schedule family {name[:40]!r}; {hint}")
