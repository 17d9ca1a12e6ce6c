"""Typed expressions: four kinds of node, frozen, hashable, compared by structure.

An expression is a DAG: a ``let`` that is used twice is one object. Hash, tree size, depth and index set are computed
once at construction, so that passes can memoise on nodes; so is an identity, which equal nodes share, because to
compare two graphs node by node would take as long as their trees are large. Passes recurse; the resolver refuses
expressions deeper than ``MAX_DEPTH`` or with more than ``MAX_SIZE`` nodes written out, so that recursion is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakValueDictionary

from flashgen.diagnostics.diagnostic import Span
from flashgen.ir.types import ScalarType

MAX_DEPTH = 120
MAX_SIZE = 20_000


class SymbolKind(Enum):
    """Where a symbol's value comes from."""

    INDEX = "index"  # b h i j hkv: global coordinates of a pair; distance: i - j, in kernels only
    BLOCK = "block"  # I J: block coordinates, in layouts only
    SIZE = "size"  # B H Hkv Nq Nk D Dv
    SCORE = "score"  # s dot sqdist; in kernels what these change by: t_dot t_norms t_s
    PARAM = "param"  # a run-time scalar argument
    FORM = "form"  # what the formulas of a form of weights are over (``weights.py``), in no spec


_NO_INDICES: frozenset[str] = frozenset()
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
    "t_dot": frozenset("bhij"),
    "t_norms": frozenset("bhij"),
    "t_s": frozenset("bhij"),
}


class _Identity:
    """What equal nodes that have children share."""

    __slots__ = ("__weakref__",)


_IDENTITIES: WeakValueDictionary[tuple[object, ...], _Identity] = WeakValueDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """Base of all nodes. ``span`` takes no part in equality."""

    type: ScalarType
    span: Span | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        children = self.children
        self._recognise()
        object.__setattr__(self, "size", 1 + sum(child.size for child in children))
        object.__setattr__(self, "depth", 1 + max((child.depth for child in children), default=0))
        indices = self._own_index_set()
        for child in children:
            indices = indices | child._index_set if indices else child._index_set
        object.__setattr__(self, "_index_set", indices)

    def _recognise(self) -> None:
        """Two threads that make a node at the same moment may get two identities: ``==`` allows for it."""
        key, children = self._key(), self.children
        if not children:
            object.__setattr__(self, "_hash", hash(key))
            object.__setattr__(self, "_identity", key)
            return
        object.__setattr__(self, "_hash", hash((key, tuple([child._hash for child in children]))))
        shared = (key, tuple([child._identity for child in children]))
        identity = _IDENTITIES.get(shared)
        if identity is None:
            identity = _IDENTITIES[shared] = _Identity()
        object.__setattr__(self, "_identity", identity)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "_identity")}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Another process hashes strings differently. Children come first, with their own hashes."""
        self.__dict__.update(state)
        self._recognise()

    # Set once in __post_init__; annotated here for readers and the type checker.
    _hash: int = field(init=False, repr=False)
    _identity: object = field(init=False, repr=False)  # of a leaf its key
    size: int = field(init=False, repr=False)
    depth: int = field(init=False, repr=False)
    _index_set: frozenset[str] = field(init=False, repr=False)

    def _own_index_set(self) -> frozenset[str]:
        """What the node depends on beside its children."""
        return _NO_INDICES

    def _key(self) -> tuple[object, ...]:
        """What tells the node from others, beside its children."""
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
        if self._identity is other._identity:
            return True
        return self._hash == other._hash and self._key() == other._key() and self.children == other.children


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

    def _own_index_set(self) -> frozenset[str]:
        positions = self.kind in (SymbolKind.INDEX, SymbolKind.BLOCK, SymbolKind.SCORE)
        return _INDEX_SETS[self.name] if positions else _NO_INDICES


@dataclass(frozen=True, eq=False, repr=False)
class Load(Expr):
    """One element of a captured tensor; ``indices`` are int expressions, one a dimension."""

    tensor: str = ""
    indices: tuple[Expr, ...] = ()

    def _key(self) -> tuple[object, ...]:
        return ("load", self.tensor)

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
        return ("apply", self.op, self.type)

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
    seen: dict[Expr, None] = {}
    for root in roots:
        for node in _unfinished(root, seen):
            seen[node] = None
            yield node


def _unfinished(root: Expr, done: Container[Expr]) -> Iterator[Expr]:
    """The nodes below ``root`` that are not in ``done``, children first; who takes one puts it there."""
    if root in done:
        return
    way = [(root, iter(root.children))]
    while way:
        node, children = way[-1]
        below = next((child for child in children if child not in done), None)
        if below is not None:
            way.append((below, iter(below.children)))
        else:
            way.pop()
            yield node


def rewrite(root: Expr, rule: Callable[[Expr], Expr], done: dict[Expr, Expr] | None = None) -> Expr:
    """Apply ``rule`` to every node bottom-up, each distinct node once.

    ``done`` holds what the rule made of nodes so far: handed in again, it is shared by several roots.
    """
    results = {} if done is None else done
    for node in _unfinished(root, results):
        children = tuple(results[child] for child in node.children)
        unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
        results[node] = rule(node if unchanged else node.with_children(children))
    return results[root]


def substitute(root: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """Replace every occurrence of the keys (by structure) with their values."""
    return rewrite(root, lambda node: values.get(node, node))


def index_set(root: Expr) -> frozenset[str]:
    """The subset of ``{b, h, i, j, distance}`` that the value depends on."""
    return root._index_set
