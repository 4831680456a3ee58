"""Two of a model's repeated blocks stand for all only where a forward shows that they can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_core import annotate
from piper_core.frontend import alike
from piper_core.frontend.table import Trace
from piper_core.frontend.trace import trace_module
from tests.torch_cpu.frontend.small import Plain

DEPTH = 5


class Marked(Plain):
    """Says where each block begins."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            with annotate("PP"):
                x = block(x)
        return self.leave(x).square().mean()


class Skips(Plain):
    """The first block's output comes in again before the last block."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.enter(x))
        for i, block in enumerate(self.blocks[1:], 1):
            x = block(x + first if i == len(self.blocks) - 1 else x)
        return self.leave(x).square().mean()


class Remembers(Plain):
    """Every block reads the first one's output."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.enter(x))
        for block in self.blocks[1:]:
            x = block(x + first)
        return self.leave(x).square().mean()


class Backwards(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.leave(x).square().mean()


class Twice(Plain):
    """One block runs again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.leave(x).square().mean()


class Counts(Plain):
    """Cannot run with fewer blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for i in range(DEPTH):
            x = self.blocks[i](x)
        return self.leave(x).square().mean()


class Odd(Plain):
    """The third block is wider, or has a frozen weight."""

    def __init__(self, how: str, depth: int = DEPTH) -> None:
        super().__init__(depth=depth)
        if how == "wide":
            self.blocks[2].mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        else:
            self.blocks[2].attn.weight.requires_grad_(False)


def inputs() -> tuple[Tensor]:
    return (torch.randn(2, 4),)


def whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Trace:
    with monkeypatch.context() as patch:
        patch.setattr(alike, "are_alike", lambda *_: False)
        return trace_module(model, inputs())


def check(ours: Trace, wanted: Trace) -> None:
    assert ours.rows() == wanted.rows()
    assert ours.model() == wanted.model()


def test_two_blocks_give_the_table_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain(depth=DEPTH)
    assert alike.are_alike(model, list(model.blocks), inputs())
    ours = trace_module(model, inputs())
    check(ours, whole(model, monkeypatch))
    assert len(model.blocks) == DEPTH
    assert [row["count"] for row in ours.rows() if row["phase"] == "F"] == [1, DEPTH, DEPTH, 1]


@pytest.mark.parametrize(
    "model",
    [
        Skips(depth=DEPTH), Remembers(depth=DEPTH), Backwards(depth=DEPTH), Twice(depth=DEPTH), Counts(depth=DEPTH),
        Odd("wide"), Odd("frozen"), Plain(depth=2),
    ],
    ids=lambda model: type(model).__name__,
)  # fmt: skip
def test_what_differs_is_captured_whole(model: Any) -> None:
    assert not alike.are_alike(model, list(model.blocks), inputs())
    assert len(model.blocks) > 1


def test_tags_of_a_person_s_own_count_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Marked(depth=DEPTH)
    assert alike.are_alike(model, list(model.blocks), inputs())  # tags are no operations
    ours = trace_module(model, inputs())
    check(ours, whole(model, monkeypatch))
    assert {chunk.tags for chunk in ours.model().chunks} == {(("PP", index),) for index in range(DEPTH)}
