"""The parameters of a region: which kinds of shard divide them, which are one tensor in the model."""

from __future__ import annotations

from torch.fx import Node

from piper_core.arch.chunk import Parameter
from piper_core.frontend import operations as ops
from piper_core.frontend.cut import Cut, Piece, tensors
from piper_core.frontend.roles import Roles
from piper_core.frontend.table import LAYER_MARK
from piper_core.names import Region


def parameters(made: Cut, piece: Piece, roles: Roles, prefix: str, tokens: int) -> tuple[Parameter, ...]:
    """Return a piece's parameters, called as in every layer that is alike.

    ``prefix`` comes before the layer's index in the names of blocks' parameters; ``tokens`` is how many tokens the
    capture had, of which a grouped product says how many each expert saw.
    """
    joint = made.joint
    given = {node.name: node for node in joint.nodes if node.op == "placeholder"}
    grouped = {
        weight.name: ops.product(node)
        for node in piece.forward.calls
        if ops.is_grouped(node) and (weight := ops.product_weight(node)) is not None
    }
    owners = {joint.parameters[name].rpartition(".")[0]: name for name in (*roles.weights, *grouped)}
    tables = _looked_up(piece, set(joint.inputs))
    mine = f"{prefix}{piece.site.layer}." if prefix else ""
    found: dict[str, Parameter] = {}
    for name in piece.parameters:
        full = joint.parameters[name]
        owner = owners.get(full.rpartition(".")[0], "")  # of a bias: its weight
        role = roles.weights.get(owner, "")
        used = 1.0
        if owner in grouped and tokens:
            used = grouped[owner].m / (tokens * grouped[owner].groups)
        shown = str(given[name].meta["desc"].target)  # where tied, the name that this site knows it by
        if mine and shown.startswith(mine):
            shown = f"{prefix}{LAYER_MARK}.{shown.removeprefix(mine)}"
        found.setdefault(
            full,
            Parameter(
                shown,
                tensors(given[name])[0].numel(),
                tensor=role == "column" or (role == "row" and name == owner) or name in tables,
                expert=owner in grouped,
                tie=_tie(made, full),
                used=used,
            ),
        )
    return tuple(found.values())


def _tie(made: Cut, full: str) -> str:
    """Return the name of the group of a parameter that several sites use ("" for one)."""
    sites = [p.site for p in made.pieces if any(made.joint.parameters[name] == full for name in p.parameters)]
    if len(sites) < 2:
        return ""
    return "embedding" if any(site.region is Region.EMBED for site in sites) else full


def _looked_up(piece: Piece, inputs: set[str]) -> set[str]:
    """Return the tables in which the model's inputs are looked up: they are divided by vocabulary."""
    found = set()
    for node in piece.forward.calls:
        if ops.name(node) == "embedding":
            weight, index = node.all_input_nodes[:2]
            if _origin(index).name in inputs:
                found.add(weight.name)
    return found


def _origin(node: Node) -> Node:
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
