"""What the regions of a closed-form chunk table are put together from: linear layers, norms, traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_core.arch.chunk import AttentionKernel, Fusion, LossWidth, Matmul, Parameter, Work
from piper_core.arch.record import Architecture

DTYPE_BYTES = 2
ACCUMULATE_BYTES = 8
"""Traffic of adding one weight gradient to its accumulator: read and write 4 bytes."""

Linear = tuple[Matmul, Matmul, Matmul]
"""F, BI and BW of a linear layer."""


def linear(tokens: float, out: int, inner: int, split: Literal["column", "row", ""], groups: int = 1) -> Linear:
    """Return F, BI and BW of a linear layer that ``groups`` experts hold, ``tokens`` for each."""
    column, row = split == "column", split == "row"
    return (
        Matmul(tokens, out, inner, "m", "n" if column else "k" if row else "", groups),
        Matmul(tokens, inner, out, "m", "k" if column else "n" if row else "", groups),
        Matmul(out, inner, tokens, "k", "m" if column else "n" if row else "", groups),
    )


@dataclass(frozen=True, slots=True)
class NormCost:
    """Bytes moved in F and BI, kernels in F and BI, and bytes kept besides the output."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int
    kept: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A model at a sequence length with its kernels, and what its regions have in common."""

    arch: Architecture
    seq: int
    kernel: AttentionKernel
    norm: Fusion
    activation: Fusion
    dropout: bool = False
    loss: LossWidth = "fp32"

    @property
    def hidden(self) -> float:
        return self.tensor(self.arch.hidden)

    @property
    def token_bytes(self) -> float:
        return self.arch.top_k * self.hidden

    def tensor(self, width: int) -> float:
        """Return the bytes of an activation ``width`` wide for one sequence."""
        return float(self.seq * width * DTYPE_BYTES)

    def works(
        self,
        linears: list[Linear],
        *,
        memory: tuple[float, float, float] = (0, 0, 0),
        replicated: tuple[float, float, float] = (0, 0, 0),
        attention: tuple[float, float] = (0, 0),
        span: tuple[float, float] = (0, 0),
        inner: tuple[float, float] = (0, 0),
        kernels: tuple[int, int, int],
    ) -> tuple[Work, Work, Work]:
        """Assemble F, BI and BW from their linear layers and traffic."""
        weights = sum(round(forward.n * forward.k) * forward.groups for forward, _, _ in linears)
        moved = (weights * DTYPE_BYTES, weights * DTYPE_BYTES, weights * ACCUMULATE_BYTES)
        core, spans, inners = (*attention, 0), (*span, 0), (*inner, 0)
        return tuple(  # type: ignore[return-value]  # three phases, three works
            Work(
                sum(each[phase].flops for each in linears),
                core[phase],
                memory[phase],
                replicated[phase],
                float(moved[phase]),
                kernels[phase],
                tuple(each[phase] for each in linears),
                self.kernel,
                spans[phase],
                inners[phase],
            )
            for phase in range(3)
        )

    def norm_cost(self, tensor: float) -> NormCost:
        """Return the cost of a norm of ``tensor`` bytes.

        Fused: read x, write y; backward reads x and dy, writes dx. Eager RMSNorm: upcast, square, mean, scale, cast
        and weight are kernels of their own, about 13 and 20 tensors of 2 bytes; it keeps an fp32 input and the
        normalised value.
        """
        if self.norm == "unfused" and self.arch.norm == "rms":
            return NormCost(13 * tensor, 20 * tensor, 6, 9, 3 * tensor)
        return NormCost(2 * tensor, 3 * tensor, 1, 1, tensor)

    def residual(self) -> tuple[float, float, float]:
        """Return bytes that adding to the residual moves in F and BI, and keeps: with dropout, a mask of one byte."""
        masked = 0.5 * self.hidden if self.dropout else 0.0
        return 3 * self.hidden + masked, 3 * self.hidden + (2 * self.hidden + masked if self.dropout else 0.0), masked

    def norm_parameters(self, name: str, width: int = 0) -> tuple[Parameter, ...]:
        """Return a norm's parameters over ``width`` (default: hidden, where LayerNorm has a bias)."""
        weight = (Parameter(f"{name}.weight", width or self.arch.hidden, tensor=False),)
        biased = self.arch.norm == "layer" and not width
        return (*weight, Parameter(f"{name}.bias", self.arch.hidden, tensor=False)) if biased else weight

    def linear_parameters(
        self, name: str, out: int, inner: int, *, row: bool = False, whole: bool = False, bias: bool | None = None
    ) -> tuple[Parameter, ...]:
        """Return a linear layer's parameters; a row-parallel layer's bias is not divided, nor is a ``whole`` layer."""
        weight = (Parameter(f"{name}.weight", out * inner, tensor=not whole),)
        biased = self.arch.bias if bias is None else bias
        return (*weight, Parameter(f"{name}.bias", out, tensor=not row)) if biased else weight
