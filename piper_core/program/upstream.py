"""Export a program in the format of upstream Piper (arXiv 2606.11169); import needs no code of its own.

Upstream's programs are JSON arrays of place, replicate, shard, split and order, and mean the same here:
``Program.parse`` reads them unchanged. What we add to the format is listed in the README's table of directives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from piper_core.directives import Directive, Order, Place, RecomputeDirective, Replicate, Shard, Split, Stage
from piper_core.errors import DirectiveError
from piper_core.ir.action import Action
from piper_core.ir.dag import Dag
from piper_core.ir.filter import Filter
from piper_core.program.program import Program

_PASSES = ("F", "B", "BI", "BW")
_FIELDS = {
    "place": {"op", "filter", "devices", "stream"},
    "replicate": {
        "op", "filter", "devices", "reduce_stream", "gather_stream", "bucket_size", "shard_grads", "shard_params",
    },
    "shard": {"op", "filter", "devices", "stream"},
    "split": {"op", "filter", "dim_name", "num_microbatches"},
}  # fmt: skip
_ORDER: tuple[type[Directive[Any]], ...] = (Place, Replicate, Shard, Split, Order)
"""The order of upstream's own files. Both apply the kinds in an order of their own."""


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags that name an action: "" where the model has one stage, or the program no split."""

    stage: str
    microbatch: str

    def of(self, action: Action) -> dict[str, Any]:
        """Return the filter that selects an action.

        Raises:
            DirectiveError: it is a recompute.
        """
        if action.kind not in _PASSES:
            _stop("actions", str(action))
        named = {self.stage: action.stage, self.microbatch: action.microbatch or 0}
        return {tag: value for tag, value in named.items() if tag} | {"PASS": action.kind.value}

    def filter(self, filter_: Filter, field: str = "filter") -> dict[str, Any]:
        """Return a filter as upstream writes it: an int, ``"*"`` or null for each tag.

        Raises:
            DirectiveError: a list or a range; a region, layer or kind of communication; the split's tag outside
                an order.
        """
        made: dict[str, Any] = {}
        for tag, value in filter_.items:
            if tag in ("LAYER", "REGION", "COMM"):
                _stop(field, f"tag {tag}", "name tags that the model carries, such as PP and EP")
            if tag == (self.microbatch or "MB") and (field == "filter" or not self.microbatch):
                _stop(field, f"tag {tag}", "upstream has it in order alone, after a split")
            if isinstance(value, tuple) or (tag == "PASS" and value not in _PASSES):
                _stop(field, f"{tag}: {list(value) if isinstance(value, tuple) else value}")
            if isinstance(value, str) and tag != "PASS" and value not in ("*", "-"):
                _stop(field, f"{tag}: {value}", "write one directive for each value")
            made[tag] = None if value == "-" else value
        return made


def to_upstream(program: Program, dag: Dag | None = None) -> list[dict[str, Any]]:
    """Return a program as upstream Piper writes it, ``actions`` as one ``order`` of ``filters`` a row.

    Rewrite::

        actions {0: "0F0 (0F1 0B0)"}   becomes   filters [[0F0], [0F1, 0B0]]   as {PP: 0, MB: 0, PASS: F} ...

    ``dag``, the base DAG, says whether the model carries ``PP``; without it, it does. The result applies to an
    equal DAG, less the claim that ``actions`` makes of naming everything on its rows.

    Raises:
        DirectiveError: a directive or a field that upstream does not have, with its position.
    """
    split = next((each for each in program.directives if isinstance(each, Split)), None)
    tags = _Tags("PP" if dag is None or dag.stages else "", split.dim_name if split else "")
    made: list[tuple[int, dict[str, Any]]] = []
    for directive in program.directives:
        try:
            made += [(_ORDER.index(type(directive)), data) for data in _lower(directive, tags)]
        except DirectiveError as error:
            raise error.at(program.where(directive)) from None
    return [data for _, data in sorted(made, key=lambda item: item[0])]


def _lower(directive: Directive[Any], tags: _Tags) -> Iterator[dict[str, Any]]:
    """Yield what upstream says in place of one directive."""
    match directive:
        case Stage():
            _stop("op", "stage", "annotate the model with PP")
        case RecomputeDirective():
            _stop("op", "recompute")
        case Order() if directive.actions:
            for row, slots in directive.actions:
                if len(slots) < 2:
                    _stop("actions", f"row {row} of one slot", "an upstream order has two groups or more")
                yield {"op": "order", "filters": [[tags.of(action) for action in slot] for slot in slots]}
            return
        case Order():
            groups = [[tags.filter(each, "filters") for each in group] for group in directive.filters]
            yield {"op": "order", "filters": groups}
            return
        case Shard() | Replicate() if len(directive.devices) > 1:
            _stop("devices", f"{len(directive.devices)} groups", "upstream has one flat list of ranks")
        case _:
            pass
    data = directive.to_data()
    unknown = sorted(data.keys() - _FIELDS[directive.op])
    if unknown:
        _stop(unknown[0], str(data[unknown[0]]))
    yield data | {"filter": tags.filter(Filter.parse(data["filter"]))}


def _stop(field: str, found: str, hint: str = "") -> NoReturn:
    raise DirectiveError(f"upstream Piper has no such {field}", found=found, hint=hint)
