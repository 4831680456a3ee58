"""How many ranks divide a model along each axis, and which numbers a model allows; known without torch."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.arch.contract import Method, check_degree
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import ShardKind

TENSOR = range(1, 9)
"""A tensor group is at most a node of eight."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks of a tensor, an expert and a context group (1: not divided); a rank has a place in each.

    ``sequence`` divides the sequence over the tensor group too, where weights are whole; ``method`` is how context
    parallel attention exchanges.
    """

    tensor: int = 1
    sequence: bool = False
    expert: int = 1
    context: int = 1
    method: Method = "ring"

    @property
    def whole(self) -> bool:
        """Whether nothing is divided."""
        return self.tensor == self.expert == self.context == 1

    def by_axis(self) -> dict[str, int]:
        """Return the number of ranks by axis."""
        return {"tensor": self.tensor, "expert": self.expert, "context": self.context}

    def check(self, architecture: Architecture, seq_len: int) -> None:
        """Reject degrees that the model does not allow.

        Raises:
            ConfigError: with the degrees that would do.
        """
        if self.tensor not in TENSOR:
            raise ConfigError(f"tensor parallel degree must be {TENSOR[0]} to {TENSOR[-1]}, found {self.tensor}")
        if self.context > 1 or self.context < 1:
            check_degree(architecture, ShardKind.CONTEXT, self.context, seq_len)
        kind = ShardKind.SEQUENCE if self.sequence else ShardKind.TENSOR
        check_degree(architecture, kind, self.tensor, seq_len // self.context)
        check_degree(architecture, ShardKind.EXPERT, self.expert, seq_len)
        heads = architecture.kv_heads // self.tensor
        if self.method == "all_to_all" and heads % self.context:
            raise ConfigError(
                f"model {architecture.name!r}: {heads} key heads of a rank cannot be scattered over {self.context} "
                "ranks; use ring"
            )
