"""What a directive is: a small record that is checked against a DAG, then rewrites it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag

if TYPE_CHECKING:
    from typing import Self

    from piper_core.mesh import Mesh

E = TypeVar("E")
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Domain:
    """The legal values of a directive's fields on one DAG.

    ``fields`` says them for a person; ``draw`` makes an instance from a seeded generator, legal where anything of
    the kind is; a directive is a member when it is legal.
    """

    fields: Mapping[str, str]
    draw: Callable[[random.Random], Directive[Any]]
    dag: Dag
    mesh: Mesh | None

    def __contains__(self, directive: object) -> bool:
        return isinstance(directive, Directive) and directive.legal(self.dag, self.mesh)

    def sample(self, seed: int) -> Directive[Any]:
        """Return one legal directive; the same seed gives the same one.

        Raises:
            DirectiveError: none was found.
        """
        rng = random.Random(seed)
        for _ in range(_TRIES):
            made = self.draw(rng)
            if made in self:
                return made
        raise DirectiveError(f"no such directive is legal here, such as {self.draw(rng).to_data()}"[:200])


class Directive(ABC, Generic[E]):
    """One op of a program. Subclasses are frozen slotted dataclasses, one a file.

    To add one: give it an ``op``, a ``check`` that raises DirectiveError or returns an edit (small arrays,
    nothing written), and a ``rewrite`` that applies the edits of all directives of its kind at once.
    """

    __slots__ = ()
    op: ClassVar[str]

    @abstractmethod
    def check(self, dag: Dag, mesh: Mesh | None = None) -> E:
        """Return the edit that this directive asks for.

        Raises:
            DirectiveError: it does not apply to ``dag``; nothing has changed.
        """

    @classmethod
    @abstractmethod
    def rewrite(cls, dag: Dag, edits: Sequence[E]) -> Dag:
        """Return a new DAG with the edits of all directives of this kind applied together."""

    @classmethod
    @abstractmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON form (a mapping with ``op``)."""

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """Return the JSON form; the inverse of :meth:`parse`."""

    @classmethod
    @abstractmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        """Return the legal values of the fields on ``dag``."""

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Self]:
        """Yield directives one local move away that are legal on ``dag``."""
        return iter(())

    def apply(self, dag: Dag, mesh: Mesh | None = None) -> Dag:
        """Return a new DAG with this directive alone applied; ``dag`` is left as it was."""
        return self.rewrite(dag, [self.check(dag, mesh)])

    def legal(self, dag: Dag, mesh: Mesh | None = None) -> bool:
        """Return whether it applies to ``dag``."""
        try:
            self.check(dag, mesh)
        except DirectiveError:
            return False
        return True
