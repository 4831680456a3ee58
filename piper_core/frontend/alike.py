"""Whether the repeated blocks of a person's model are alike, so that two of them can stand for all.

A forward on fake tensors records every operation, which block it is in, and where its operands come from: an operation
of the same block, of the block before, of what comes before all blocks, a parameter by its name inside the block. The
model is run whole, and again with its first two blocks alone. If each later block, and what lies between blocks, reads
as the second one, and both ends read as in the whole, the short model's graph is the whole one's but for length. (A
``torch.autograd.Function`` is known by the operations of its forward.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from piper_core.frontend.capture import mode_of

KEPT = 2
Segment: TypeAlias = tuple[Any, ...]


def are_alike(model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> bool:
    """Say whether the first two of ``blocks`` stand for all; ``inputs`` are the model's, of any device."""
    if len(blocks) <= KEPT:
        return False
    try:
        whole = _read(model, blocks, inputs)
        with shortened(model, blocks):
            short = _read(model, blocks[:KEPT], inputs)
    except Exception:  # whatever a forward of fewer blocks, or of fake tensors, raises: then it is captured whole
        return False
    if len(whole) != 2 * len(blocks) + 1 or len(short) != 2 * KEPT + 1:
        return False  # a block that ran twice, or not at all
    *_, between, second, end = short
    return whole[:4] == short[:4] and whole[-1] == end and all(
        pair == [between, second] for pair in (whole[i : i + 2] for i in range(2, len(whole) - 1, 2))
    )  # fmt: skip


@contextmanager
def shortened(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """The list that holds ``blocks`` holds the first two alone inside."""
    home = next(m for m in model.modules() if list(m.children()) == list(blocks))
    before = home._modules
    home._modules = dict(list(before.items())[:KEPT])
    try:
        yield
    finally:
        home._modules = before


def _read(model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Segment]:
    """Return what runs before the first block, in it, between it and the next, and so on to the end."""
    mode = mode_of(model, inputs)
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        given = [torch.empty(tuple(each.shape), dtype=each.dtype) for each in inputs]
        reader = _Reader(model, blocks, given)
        for block in blocks:
            for hook in (block.register_forward_pre_hook(reader.turn), block.register_forward_hook(reader.turn)):
                stack.callback(hook.remove)
        stack.enter_context(reader)
        model(*given)
    return [tuple(each) for each in reader.segments]


class _Reader(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records operations by segment; tensors are kept, so that none has the identity of one before."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.segments: list[list[Any]] = [[]]
        self.known: dict[int, tuple[Any, ...]] = {}
        self.kept: list[Tensor] = []
        for index, each in enumerate(inputs):
            self._learn(each, ("input", index))
        for owner, module in ((-1, model), *enumerate(blocks)):
            for name, each in (*module.named_parameters(), *module.named_buffers()):
                self._learn(each, ("held", owner, name, tuple(each.shape), each.dtype, each.requires_grad))

    def turn(self, *_: Any) -> None:
        """Begin the next segment."""
        self.segments.append([])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        at = len(self.segments) - 1
        given, form = tree_flatten((args, kwargs))
        self.segments[at].append((str(func), str(form), tuple(self._source(each, at) for each in given)))
        for index, each in enumerate(tree_flatten(out)[0]):
            if isinstance(each, Tensor):
                self._learn(each, ("made", at, len(self.segments[at]), index))
        return out

    def _learn(self, tensor: Tensor, what: tuple[Any, ...]) -> None:
        self.known[id(tensor)] = what
        self.kept.append(tensor)

    def _source(self, value: Any, at: int) -> Any:
        """Return where an operand comes from, alike in every block that is alike."""
        if not isinstance(value, Tensor):
            return repr(value)
        match self.known.get(id(value), ("constant", id(value))):
            case ("made", 0, *rest):
                return "start", *rest
            case ("made", segment, *rest):
                return "made", at - segment, *rest
            case ("held", owner, *rest) if owner >= 0:
                return "held", at - (2 * owner + 1), *rest
            case other:
                return other
