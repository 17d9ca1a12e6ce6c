"""Typed expressions: four kinds of node, frozen, hashable, compared by structure.

An expression is a DAG: a ``let`` that is used twice is one object. Hash, tree size and depth are computed
once at construction, so that passes can memoise on nodes. Passes recurse; the resolver refuses expressions
deeper than ``MAX_DEPTH`` or with more than ``MAX_SIZE`` nodes written out, so that recursion is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from flashgen.diagnostics.span import Span
from flashgen.ir.types import ScalarType

MAX_DEPTH = 120
MAX_SIZE = 20_000


class SymbolKind(Enum):
    """Where a symbol's value comes from."""

    INDEX = "index"  # b h i j hkv: global coordinates of a pair; distance: i - j, in kernels only
    BLOCK = "block"  # I J: block coordinates, in layouts only
    SIZE = "size"  # B H Hkv Nq Nk D Dv
    SCORE = "score"  # s dot sqdist
    PARAM = "param"  # a run-time scalar argument


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """Base of all nodes. ``span`` takes no part in equality."""

    type: ScalarType
    span: Span | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        key = self._key()
        children = self.children
        object.__setattr__(self, "_hash", hash(key))
        object.__setattr__(self, "size", 1 + sum(child.size for child in children))
        object.__setattr__(self, "depth", 1 + max((child.depth for child in children), default=0))

    def __setstate__(self, state: dict[str, object]) -> None:
        """Another process hashes strings differently. Children come first, with their own hashes."""
        self.__dict__.update(state)
        object.__setattr__(self, "_hash", hash(self._key()))

    # Set once in __post_init__; annotated here for readers and the type checker.
    _hash: int = field(init=False, repr=False)
    size: int = field(init=False, repr=False)
    depth: int = field(init=False, repr=False)

    def _key(self) -> tuple[object, ...]:
        raise NotImplementedError

    @property
    def children(self) -> tuple[Expr, ...]:
        """The nodes that this one is computed from."""
        return ()

    def with_children(self, children: tuple[Expr, ...]) -> Expr:
        """The same node over other children (same number, same types)."""
        assert not children, "a leaf has no children"
        return self

    def __repr__(self) -> str:
        return self._shown(levels=5)

    def _shown(self, levels: int) -> str:
        """Prefix notation, cut off below some levels: an expression that shares may be huge when written out."""
        head = "/".join(str(part) for part in self._key()[1:] if isinstance(part, str))
        if not self.children:
            return head
        return f"{head}({', '.join(c._shown(levels - 1) for c in self.children) if levels else '…'})"

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr):
            return NotImplemented
        return self._hash == other._hash and self._key() == other._key()


@dataclass(frozen=True, eq=False, repr=False)
class Literal(Expr):
    """A constant. Float values may be infinite; NaN never occurs."""

    value: bool | int | float = 0

    def _key(self) -> tuple[object, ...]:
        # repr tells -0.0 from 0.0 and 1 from True.
        return ("literal", self.type, repr(self.value))


@dataclass(frozen=True, eq=False, repr=False)
class Symbol(Expr):
    """A named input: an index, a size, a score input, or a param."""

    name: str = ""
    kind: SymbolKind = SymbolKind.INDEX

    def _key(self) -> tuple[object, ...]:
        return ("symbol", self.kind, self.name)


@dataclass(frozen=True, eq=False, repr=False)
class Load(Expr):
    """One element of a captured tensor; ``indices`` are int expressions, one a dimension."""

    tensor: str = ""
    indices: tuple[Expr, ...] = ()

    def _key(self) -> tuple[object, ...]:
        return ("load", self.tensor, self.indices)

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.indices

    def with_children(self, children: tuple[Expr, ...]) -> Expr:
        return Load(self.type, tensor=self.tensor, indices=children, span=self.span)


@dataclass(frozen=True, eq=False, repr=False)
class Apply(Expr):
    """An operator of the table in ``operators.py`` applied to arguments."""

    op: str = ""
    args: tuple[Expr, ...] = ()

    def _key(self) -> tuple[object, ...]:
        return ("apply", self.op, self.type, self.args)

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args

    def with_children(self, children: tuple[Expr, ...]) -> Expr:
        return Apply(self.type, op=self.op, args=children, span=self.span)


def literal(value: bool | int | float, span: Span | None = None) -> Literal:
    """A literal whose type follows from the Python value."""
    if isinstance(value, bool):
        return Literal(ScalarType.BOOL, value=value, span=span)
    if isinstance(value, int):
        return Literal(ScalarType.INT, value=value, span=span)
    return Literal(ScalarType.FLOAT, value=value, span=span)


def index(name: str, span: Span | None = None) -> Symbol:
    """One of the indices ``b h i j hkv``, or ``distance``, which is i - j."""
    return Symbol(ScalarType.INT, name=name, kind=SymbolKind.INDEX, span=span)


def size(name: str, span: Span | None = None) -> Symbol:
    """One of the sizes ``B H Hkv Nq Nk D Dv``."""
    return Symbol(ScalarType.INT, name=name, kind=SymbolKind.SIZE, span=span)


def score_input(name: str, span: Span | None = None) -> Symbol:
    """One of ``s dot sqdist``."""
    return Symbol(ScalarType.FLOAT, name=name, kind=SymbolKind.SCORE, span=span)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below ``roots``, children before parents, each once."""
    seen: set[Expr] = set()

    def visit(node: Expr) -> Iterator[Expr]:
        if node in seen:
            return
        seen.add(node)
        for child in node.children:
            yield from visit(child)
        yield node

    for root in roots:
        yield from visit(root)


def rewrite(root: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Apply ``rule`` to every node bottom-up, each distinct node once."""
    done: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        if node not in done:
            children = tuple(visit(child) for child in node.children)
            unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
            done[node] = rule(node if unchanged else node.with_children(children))
        return done[node]

    return visit(root)


def substitute(root: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """Replace every occurrence of the keys (by structure) with their values."""
    return rewrite(root, lambda node: values.get(node, node))


_INDEX_SETS = {
    "b": frozenset("b"),
    "h": frozenset("h"),
    "hkv": frozenset("h"),
    "i": frozenset("i"),
    "j": frozenset("j"),
    "distance": frozenset({"distance"}),
    "I": frozenset("i"),
    "J": frozenset("j"),
    "s": frozenset("bhij"),
    "dot": frozenset("bhij"),
    "sqdist": frozenset("bhij"),
}


def index_set(root: Expr) -> frozenset[str]:
    """The subset of ``{b, h, i, j, distance}`` that the value depends on."""
    found: frozenset[str] = frozenset()
    for node in walk(root):
        if isinstance(node, Symbol) and node.kind in (SymbolKind.INDEX, SymbolKind.BLOCK, SymbolKind.SCORE):
            found |= _INDEX_SETS[node.name]
    return found
