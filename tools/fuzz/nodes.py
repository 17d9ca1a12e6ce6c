"""What a drawn spec is made of: expressions and statements as trees of text, which can be printed and cut down.

In: nothing. Out: ``Node``, ``Statement``, ``SpecDraw``. A node knows its type, and the values that it may have as far
as the range rules of the operator table tell: that is what keeps drawn scores in a size at which float32 is accurate.
Nothing here is an expression of the IR: a drawn spec goes through the whole compiler, its parser included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flashgen.ir.interval import FULL_BOOL, FULL_FLOAT, FULL_INT, FloatRange, IntRange, Range
from flashgen.ir.types import ScalarType

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT
_FULL: dict[ScalarType, Range] = {BOOL: FULL_BOOL, INT: FULL_INT, FLOAT: FULL_FLOAT}


@dataclass(frozen=True)
class Node:
    """An expression: ``template`` with ``{0}``, ``{1}``, … for its children. ``known`` holds what it may be."""

    type: ScalarType
    template: str
    children: tuple[Node, ...] = ()
    known: Range | None = None

    def __str__(self) -> str:
        return self.template.format(*self.children)

    @property
    def range(self) -> Range:
        """What it may be; any value of its type where nothing is known."""
        return _FULL[self.type] if self.known is None else self.known

    def below(self) -> Iterator[Node]:
        """Every node under this one, from the top."""
        for child in self.children:
            yield child
            yield from child.below()

    @property
    def size(self) -> int:
        """The number of nodes."""
        return 1 + sum(child.size for child in self.children)


def leaf(scalar: ScalarType, text: str, values: Range | None = None) -> Node:
    """A name or a number."""
    return Node(scalar, text, (), values)


def number(value: float) -> Node:
    """A literal of the language; a negative one in parentheses."""
    if isinstance(value, int):
        text = str(value) if value >= 0 else f"({value})"
        return Node(INT, text, (), IntRange(value, value))
    text = repr(value) if value >= 0 else f"({value!r})"
    return Node(FLOAT, text, (), FloatRange(value, value))


# What stands for any expression of a type, the plainest first.
PLAINEST: dict[ScalarType, tuple[Node, ...]] = {
    FLOAT: (number(0.0), number(1.0)),
    INT: (number(0), number(1)),
    BOOL: (leaf(BOOL, "true"), leaf(BOOL, "false")),
}


@dataclass(frozen=True)
class Statement:
    """One statement, or a ``def``: ``template`` with ``{0}``, … for its expressions.

    ``word`` is the statement's own (``score``), ``name`` what it declares. Where ``plain`` is given the statement can
    be replaced by it; an empty one says that it can be left out.
    """

    word: str
    template: str
    nodes: tuple[Node, ...] = ()
    name: str = ""
    plain: str | None = ""

    def __str__(self) -> str:
        return self.template.format(*self.nodes)


@dataclass(frozen=True)
class SpecDraw:
    """One attention block and the definitions before it."""

    name: str
    head_dim: str
    statements: tuple[Statement, ...]
    definitions: tuple[Statement, ...] = field(default=())

    @property
    def text(self) -> str:
        """The spec as a file."""
        definitions = "".join(f"{each}\n" for each in self.definitions)
        body = "".join(f"    {each}\n" for each in self.statements)
        return f"{definitions}attention {self.name} {{\n    head_dim {self.head_dim}\n{body}}}\n"

    def tidied(self) -> SpecDraw:
        """Without declarations and definitions that nothing uses."""
        tidy = self
        while True:
            statements = tuple(each for each in tidy.statements if not each.name or tidy.uses(each))
            definitions = tuple(each for each in tidy.definitions if tidy.uses(each))
            if (statements, definitions) == (tidy.statements, tidy.definitions):
                return tidy
            tidy = replace(tidy, statements=statements, definitions=definitions)

    def uses(self, statement: Statement) -> bool:
        """Whether the name that a statement declares stands anywhere else."""
        word = re.compile(rf"\b{re.escape(statement.name)}\b")
        others = (each for each in (*self.definitions, *self.statements) if each is not statement)
        return any(word.search(str(each)) for each in others)
