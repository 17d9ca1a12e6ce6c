"""The syntax tree of a `.attn` file: what stands in the text, with its place, before any name means anything.

Made by ``parser``, read by the resolver. An expression carries its depth, so that nothing downstream has to recurse
to find out whether it may.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.diagnostics import Span


@dataclass(frozen=True, eq=False)
class Name:
    """A name where it is introduced or chosen from a list: a declared name, a type, a schedule entry."""

    text: str
    span: Span


# --- expressions


@dataclass(frozen=True, eq=False)
class Expression:
    """Base of all expressions."""

    span: Span
    depth: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 + max((child.depth for child in self.children), default=0))

    @property
    def children(self) -> tuple[Expression, ...]:
        """The expressions directly inside this one, in the order of its fields."""
        parts = (each if isinstance(each, tuple) else (each,) for each in vars(self).values())
        return tuple(each for part in parts for each in part if isinstance(each, Expression))


@dataclass(frozen=True, eq=False)
class Reference(Expression):
    """A name that is used."""

    name: str


@dataclass(frozen=True, eq=False)
class Number(Expression):
    """A number as written; its value is worked out by ``constants``."""

    text: str


@dataclass(frozen=True, eq=False)
class Boolean(Expression):
    """``true`` or ``false``."""

    value: bool


@dataclass(frozen=True, eq=False)
class Group(Expression):
    """An expression in parentheses."""

    inner: Expression


@dataclass(frozen=True, eq=False)
class Unary(Expression):
    """``-x`` or ``not x``."""

    operator: str
    operand: Expression


@dataclass(frozen=True, eq=False)
class Binary(Expression):
    """Two operands and an operator between them, ``and`` and ``or`` included."""

    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True, eq=False)
class Compare(Expression):
    """A comparison, possibly chained: one operator fewer than operands."""

    operands: tuple[Expression, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Conditional(Expression):
    """``yes if condition else no``."""

    yes: Expression
    condition: Expression
    no: Expression


@dataclass(frozen=True, eq=False)
class Index(Expression):
    """``base[indices]``."""

    base: Expression
    indices: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Named(Expression):
    """``name = value`` among the arguments of a call or the indices of a tensor."""

    name: Name
    value: Expression


@dataclass(frozen=True, eq=False)
class Call(Expression):
    """``callee(arguments)``."""

    callee: Expression
    arguments: tuple[Expression, ...]


# --- statements of an attention block


@dataclass(frozen=True, eq=False)
class Statement:
    """Base of all statements; ``keyword`` is the word that starts it."""

    span: Span
    keyword: str

    @property
    def word(self) -> Span:
        span = self.span
        return Span(span.file, span.line, span.column, span.line, span.column + len(self.keyword))


@dataclass(frozen=True, eq=False)
class HeadDims(Statement):
    """``head_dim 64, 192/128``."""

    values: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Dtypes(Statement):
    """``dtype f16, bf16``."""

    names: tuple[Name, ...]


@dataclass(frozen=True, eq=False)
class Const(Statement):
    """``const NAME = EXPR``."""

    name: Name
    value: Expression


@dataclass(frozen=True, eq=False)
class Param(Statement):
    """``param NAME: TYPE = EXPR grad``."""

    name: Name
    type: Name
    default: Expression | None
    grad: Span | None


@dataclass(frozen=True, eq=False)
class Tensor(Statement):
    """``tensor NAME: TYPE[SHAPE] grad``."""

    name: Name
    element: Name
    shape: tuple[Expression, ...]
    grad: Span | None


@dataclass(frozen=True, eq=False)
class Let(Statement):
    """``let NAME = EXPR``."""

    name: Name
    value: Expression


@dataclass(frozen=True, eq=False)
class Layout(Statement):
    """``layout block SIZE: EXPR``."""

    block: Expression
    value: Expression


@dataclass(frozen=True, eq=False)
class Select(Statement):
    """``select SIZE: NAME[…, :]``; a slot that is a place holds the colon that stands there."""

    block: Expression
    tensor: Name
    slots: tuple[Expression | Span, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """``NAME = EXPR`` in a schedule."""

    name: Name
    value: Expression


@dataclass(frozen=True, eq=False)
class Schedule(Statement):
    """``schedule { entries }``."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Single(Statement):
    """A word and one expression: ``scale``, ``score``, ``mask``, ``weights``, ``dropout``."""

    value: Expression


@dataclass(frozen=True, eq=False)
class Broken(Statement):
    """A statement that did not parse. It has been reported; ``name`` is what it would have declared, if anything."""

    name: Name | None


# --- a file


@dataclass(frozen=True, eq=False)
class Import:
    """``import "path"``; ``path_span`` covers the quotes."""

    path: str
    path_span: Span


@dataclass(frozen=True, eq=False)
class Definition:
    """``def NAME(parameters) = body``; ``parameters`` is None where there are no parentheses."""

    name: Name
    parameters: tuple[Name, ...] | None
    body: Expression


@dataclass(frozen=True, eq=False)
class Attention:
    """``attention NAME { statements }``."""

    name: Name
    statements: tuple[Statement, ...]


Item = Import | Definition | Attention | Broken


@dataclass(frozen=True, eq=False)
class File:
    """All that a file holds, in its order."""

    items: tuple[Item, ...]
