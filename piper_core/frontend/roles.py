"""How tensor parallelism would divide a region: which products are column and which are row parallel, and which values
lie between them, divided (Shoeybi 2019, arXiv 1909.08053, section 3).

A product with a weight is row parallel if others come before it in the region and none after; column parallel if all
that follow it are row parallel. The projection of the head is column parallel, alone. Others are whole on every rank,
such as a router's scores or a latent's projection down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from piper_core.frontend.cut import Piece, is_view
from piper_core.frontend.operations import name, product_weight, weight_of
from piper_core.names import Region

Role = Literal["column", "row", ""]


@dataclass(frozen=True, slots=True)
class Roles:
    """``weights`` says each weight's role by its placeholder, ``divided`` are the values of both passes that tensor
    parallelism divides, ``entering`` what column parallel products read."""

    weights: dict[str, Role]
    divided: frozenset[Node]
    entering: tuple[Node, ...]

    def of(self, weight: Node | None) -> Role:
        return "" if weight is None else self.weights.get(weight.name, "")


def roles(piece: Piece) -> Roles:
    """Return the roles of a piece's weights."""
    calls = piece.forward.calls
    before: dict[Node, set[Node]] = {}  # the products that each value depends on
    products = [node for node in calls if product_weight(node) is not None]
    for node in calls:
        sources = [source for source in node.all_input_nodes if source in before]
        before[node] = {p for source in sources for p in before[source]}
        before[node] |= {source for source in sources if source in products}
    after = {product: {p for p in products if product in before[p]} for product in products}
    row = {p for p in products if before[p] and not after[p]}
    column = {p for p in products if p not in row and after[p] and after[p] <= row}
    if piece.site.region is Region.HEAD:
        column |= {p for p in products if not after[p]}
        row -= column
    weights: dict[str, Role] = {}
    for members, role in ((column, "column"), (row, "row")):
        for p in members:
            weight = product_weight(p)
            assert weight is not None
            weights.setdefault(weight.name, "column" if role == "column" else "row")
    divided = {node for node in calls if node in column or (before[node] & column and not before[node] & row)} - row
    divided |= _backward_divided(piece, weights, divided)
    entering = {n: None for p in sorted(column) for n in p.all_input_nodes if n in before and weight_of(n) is None}
    return Roles(weights, frozenset(divided), tuple(entering))


def _backward_divided(piece: Piece, weights: dict[str, Role], divided: set[Node]) -> set[Node]:
    """Return the backward's divided values: those that come from a divided one, up to the column parallel product."""
    found: set[Node] = set()
    for node in piece.backward.calls:
        weight = product_weight(node)
        if weight is not None:
            if weights.get(weight.name) == "row":
                found.add(node)
        elif any(n in found or n in divided for n in node.all_input_nodes):
            found.add(node)
    return found


def gradient_products(piece: Piece) -> dict[Node, str]:
    """Return the product behind each weight's gradient (BW), and that weight."""
    found: dict[Node, str] = {}
    for weight, node in piece.gradients:
        while product_weight(node) is None and len(node.all_input_nodes) == 1 and _is_plain(node):
            node = node.all_input_nodes[0]
        found[node] = weight
    return found


def _is_plain(node: Node) -> bool:
    return is_view(node) or name(node) in ("_to_copy", "clone")
