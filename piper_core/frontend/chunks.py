"""Traced pieces as chunk records: the same table as :func:`piper_core.arch.model_chunks`, from graphs.

Two captures at different batches are compared call by call. Where each dimension of each tensor either stays or grows
with the batch, one at most in a tensor, every cost is exactly affine in the batch, and two points give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from piper_core.arch.chunk import Chunk, Matmul, Parameter, Saved, Work
from piper_core.frontend import operations as ops
from piper_core.frontend.cut import ChunkGraph, Cut, Piece, tensors
from piper_core.frontend.layout import Layout, expand
from piper_core.frontend.parameters import parameters
from piper_core.frontend.recompute import fused, kept
from piper_core.frontend.roles import Roles, roles
from piper_core.frontend.table import Affine, Kernels, PhaseTotals, Template, Trace
from piper_core.frontend.work import Product, Totals, held, measure, workspace
from piper_core.names import Phase, Recompute, Region

_PHASES = (Phase.F, Phase.BI, Phase.BW, Phase.R)
_SWAP = {"m": "n", "n": "m", "k": "k", "": ""}


def exact(first: Cut, second: Cut, batches: tuple[int, int]) -> bool:
    """Say whether costs are affine in the batch between two captures, see the module's docstring."""
    one, two = batches
    if len(first.joint.nodes) != len(second.joint.nodes) or len(first.pieces) != len(second.pieces):
        return False
    for left, right in zip(first.joint.nodes, second.joint.nodes, strict=True):
        if left.target != right.target and left.op != "placeholder":
            return False
        for small, large in zip(tensors(left), tensors(right), strict=True):
            if small.dim() != large.dim():
                return False
            grown = [(a, b) for a, b in zip(small.shape, large.shape, strict=True) if a != b]
            if len(grown) > 1 or any(a * two != b * one for a, b in grown):
                return False
    return True


def table(
    name: str,
    cuts: Sequence[Cut],
    batches: Sequence[int],
    layout: Layout,
    *,
    seq_len: int,
    micro_batch: int,
    kernels: Kernels = "eager",
    units: tuple[tuple[str, int], ...] = (),
) -> Trace:
    """Return the traced table from one capture, or from two between which :func:`exact` holds."""
    builder = _Table(tuple(cuts), tuple(batches), kernels, layout)
    templates, at = builder.templates()
    instances, edges = expand(cuts[0], layout, at, builder.edge_bytes())
    count = len(layout.captured) or 1 + max(piece.site.layer for piece in cuts[0].pieces)
    return Trace(
        name, count, seq_len, micro_batch, len(cuts) == 2, builder.dtype_bytes,
        templates, instances, edges, units,
    )  # fmt: skip


class _Table:
    """The pieces of one or two captures side by side."""

    def __init__(self, cuts: tuple[Cut, ...], batches: tuple[int, ...], kernels: Kernels, layout: Layout) -> None:
        self.cuts, self.batches, self.kernels, self.layout = cuts, batches, kernels, layout
        self.roles = [[roles(piece) for piece in made.pieces] for made in cuts]
        joint = cuts[0].joint
        self.given = {node.name: node for node in joint.nodes if node.op == "placeholder"}
        first = next(iter(joint.parameters), None)
        self.dtype_bytes = tensors(self.given[first])[0].element_size() if first else 2
        self.hidden = self._hidden()
        self.tokens = max((tensors(self.given[n])[0].numel() for n in joint.inputs if n), default=1)
        if all(tensors(self.given[n])[0].is_floating_point() for n in joint.inputs if n):
            self.tokens = 0

    # one quantity of both captures ----------------------------------------------------------------------------------

    def affine(self, values: Sequence[float]) -> Affine:
        """Return the line through a quantity's values at the two batches; of one capture, a multiple of the batch."""
        if len(values) == 1:
            return Affine(0.0, values[0] / self.batches[0])
        each = (values[1] - values[0]) / (self.batches[1] - self.batches[0])
        return Affine(values[0] - each * self.batches[0], each)

    def both(self, index: int, quantity: Callable[[Piece, Roles], float]) -> Affine:
        """Return a quantity of a piece, by batch."""
        return self.affine([quantity(c.pieces[index], r[index]) for c, r in zip(self.cuts, self.roles, strict=True)])

    def saved(self, held_by: Sequence[tuple[float, float]]) -> Saved:
        sharded, replicated = (self.affine(values).each for values in zip(*held_by, strict=True))
        return Saved(sharded, replicated)

    def edge_bytes(self) -> list[float]:
        """Return what each edge carries for one sequence."""
        pairs = zip(*(made.edges for made in self.cuts), strict=True)
        return [self.affine([sum(map(_bytes, edge[2])) for edge in pair]).each for pair in pairs]

    # chunks ---------------------------------------------------------------------------------------------------------

    def templates(self) -> tuple[tuple[Template, ...], dict[int, int]]:
        """Return the distinct chunks, and which of them each piece is."""
        found: dict[object, int] = {}
        made: list[Template] = []
        at: dict[int, int] = {}
        counted: list[set[int]] = [set() for _ in self.cuts]
        for index, piece in enumerate(self.cuts[0].pieces):
            graphs = (piece.forward, piece.backward, piece.backward_input, piece.backward_weight)
            own = parameters(self.cuts[0], piece, self.roles[0][index], self.layout.prefix, self.tokens)
            key = (piece.site.region, tuple(graph.digest() for graph in graphs), own)
            if key in found:
                for counts, made_cut, role in zip(counted, self.cuts, self.roles, strict=True):
                    held(made_cut.pieces[index].saved, role[index], counts)
            else:
                found[key] = len(made)
                made.append(self.template(index, own, counted))
            at[index] = found[key]
        return tuple(made), at

    def template(self, index: int, own: tuple[Parameter, ...], counted: list[set[int]]) -> Template:
        piece = self.cuts[0].pieces[index]
        lean = self.kernels == "fused"
        saved_now, before = [], [set(each) for each in counted]
        for made, role, seen in zip(self.cuts, self.roles, counted, strict=True):
            each = made.pieces[index]
            stay = [*_received(each, fused(each)), *fused(each)] if lean else each.saved
            saved_now.append(held(stay, role[index], seen))
        totals = {phase: self.totals(index, phase) for phase in _PHASES}
        works = {phase: self.work(totals[phase]) for phase in _PHASES}

        def keeping(policy: Recompute) -> Saved:
            found = []
            for made, role, seen in zip(self.cuts, self.roles, before, strict=True):
                each = made.pieces[index]
                stay = kept(each, policy)
                found.append(held([*_received(each, stay), *stay], role[index], set(seen)))
            return self.saved(found)

        stash = [held(c.pieces[index].stash, r[index], set()) for c, r in zip(self.cuts, self.roles, strict=True)]
        region, site = piece.site.region, piece.site
        calls = [ops.attention(n) for n in piece.forward.calls if ops.is_attention(n)]
        share = self.batches[0]
        hidden = self.hidden or max((_floats(n) for n in piece.sent), default=0.0) / share
        column = sum(held(self.roles[0][index].entering, self.roles[0][index], set())) / share
        sent = self.both(index, lambda p, _: sum(map(_floats, p.sent))).each if region is not Region.HEAD else 0.0
        chunk = Chunk(
            region, site.layer, works[Phase.F], works[Phase.BI], works[Phase.BW],
            core=works[Phase.R],
            again=self.again(index) if region is Region.MLP else None,
            parameters=own,
            output_bytes=sent,
            hidden_bytes=hidden,
            column_bytes=column if region is Region.ATTENTION and column != hidden else 0.0,
            token_bytes=self._token_bytes(index),
            kv_bytes=sum(call.kv_bytes for call in calls) / share,
            qkvo_bytes=sum(call.qkvo_bytes for call in calls) / share,
            saved=self.saved(saved_now),
            saved_selective=keeping(Recompute.SELECTIVE),
            saved_full=keeping(Recompute.FULL),
            stash=self.saved(stash),
            workspace_bytes=self.both(index, lambda p, _: workspace(p.backward)).each,
            loss_bytes=3 * 4.0 * self.tokens / share if region is Region.HEAD else 0.0,
        )  # fmt: skip
        phases = tuple(self.phase_totals(index, phase, totals[phase]) for phase in _PHASES[:3])
        whole = [self.totals(index, Phase.B)]
        phases = (phases[0], self.phase_totals(index, Phase.B, whole[0]), *phases[1:])
        saved_bytes = self.affine([sharded + replicated for sharded, replicated in saved_now])
        return Template(chunk, phases, saved_bytes)

    def again(self, index: int) -> Work:
        """Return what full recompute repeats of a chunk whose output nobody asks for."""
        pairs = zip((made.pieces[index] for made in self.cuts), self.roles, strict=True)
        return self.work([
            measure(piece.recompute(kept(piece, Recompute.FULL)), piece, role[index], self.kernels)
            for piece, role in pairs
        ])  # fmt: skip

    def graph(self, piece: Piece, phase: Phase) -> ChunkGraph:
        """Return a phase's graph; of fused kernels, a backward with what it computes again."""
        lean = self.kernels == "fused"
        match phase:
            case Phase.F:
                return piece.forward_keeping(fused(piece)) if lean else piece.forward
            case Phase.R:
                return piece.recompute(kept(piece, Recompute.SELECTIVE))
            case Phase.B:
                made = piece.backward
            case Phase.BI:
                made = piece.backward_input
            case _:
                made = piece.backward_weight
        return piece.joined(made, fused(piece)) if lean else made

    def totals(self, index: int, phase: Phase) -> list[Totals]:
        """Return a phase's totals in each capture."""
        return [
            measure(self.graph(made.pieces[index], phase), made.pieces[index], role[index], self.kernels)
            for made, role in zip(self.cuts, self.roles, strict=True)
        ]

    def phase_totals(self, index: int, phase: Phase, totals: list[Totals]) -> PhaseTotals:
        return PhaseTotals(
            phase.name,
            self.affine([each.flops for each in totals]),
            self.affine([each.read for each in totals]),
            self.affine([each.written for each in totals]),
            totals[0].kernels,
            self.graph(self.cuts[0].pieces[index], phase).digest(),
        )

    def work(self, totals: list[Totals]) -> Work:
        """Return the record of one phase; traffic that does not grow with the batch is counted with the weights."""
        of = {name: self.affine([getattr(each, name) for each in totals]) for name in _WORK}
        fixed = of["memory"].fixed + of["replicated"].fixed
        pairs = zip(*(each.products for each in totals), strict=True)
        return Work(
            matmul_flops=of["matmul_flops"].each,
            attention_flops=of["attention_flops"].each,
            memory_bytes=of["memory"].each,
            replicated_bytes=of["replicated"].each,
            weight_bytes=totals[0].weights + max(fixed, 0.0),
            kernels=totals[0].kernels,
            matmuls=tuple(made for pair in pairs if (made := self.matmul(pair)) is not None),
            attention_kernel="unfused" if totals[0].written_out else "flash2",
            attention_span=totals[0].span,
        )

    def matmul(self, pair: tuple[Product, ...]) -> Matmul | None:
        """Return a product for one sequence, or None where none of its dimensions grows with the batch."""
        product, shape = pair[0], pair[0].shape
        b = self.batches[0]
        sizes = {d: float(getattr(shape, d)) for d in ("m", "n", "k")}
        if len(pair) == 2:
            grows = [d for d in ("m", "n", "k") if getattr(pair[1].shape, d) != getattr(shape, d)]
        else:
            grows = ["k"] if product.part == "weight" else ["m"]
        if not grows:
            return None
        split = _split_of(product)
        if grows[0] == "n":
            sizes, split, grows = {"m": sizes["n"], "n": sizes["m"], "k": sizes["k"]}, _SWAP[split], ["m"]
        sizes[grows[0]] /= b * (1 if shape.batched else shape.groups)
        tokens = "k" if grows[0] == "k" else "m"
        return Matmul(sizes["m"], sizes["n"], sizes["k"], tokens, split, shape.groups)  # type: ignore[arg-type]  # one of m, n, k

    def _hidden(self) -> float:
        """Return the bytes of one hidden-state tensor of one sequence: what the embedding hands on."""
        embeds = [piece for piece in self.cuts[0].pieces if piece.site.region is Region.EMBED]
        return max((_floats(n) for piece in embeds for n in piece.sent), default=0.0) / self.batches[0]

    def _token_bytes(self, index: int) -> float:
        """Return the bytes of the copies of tokens that go from a router to its experts."""
        region = self.cuts[0].pieces[index].site.region
        if region not in (Region.ROUTER, Region.EXPERT):
            return 0.0
        side = 0 if region is Region.ROUTER else 1
        values = [n for edge in self.cuts[0].edges if edge[side] == index for n in edge[2]]
        both_ends = [
            n for edge in self.cuts[0].edges if edge[side] == index and self._is_dispatch(edge) for n in edge[2]
        ]
        return max(map(_floats, both_ends or values), default=0.0) / self.batches[0]

    def _is_dispatch(self, edge: tuple[int, int, object]) -> bool:
        pieces = self.cuts[0].pieces
        return pieces[edge[0]].site.region is Region.ROUTER and pieces[edge[1]].site.region is Region.EXPERT


_WORK = ("matmul_flops", "attention_flops", "memory", "replicated")


def _received(piece: Piece, stay: Sequence[Node]) -> list[Node]:
    """Return what a piece holds of what it received: what backwards read, and what R starts from."""
    again = piece.recompute(stay)
    mine = set(piece.received)
    return [n for n in dict.fromkeys((*piece.saved, *again.inputs)) if n in mine]


def _split_of(product: Product) -> str:
    """Return the dimension that tensor parallelism divides."""
    match product.role, product.part:
        case "column", "output":
            return "n"
        case "column", "input":
            return "k"
        case "column", "weight":
            return "m"
        case "row", "output":
            return "k"
        case "row", _:
            return "n"
        case _:
            return ""


def _bytes(node: Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(node))


def _floats(node: Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(node) if t.is_floating_point())
