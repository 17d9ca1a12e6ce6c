"""Selected keys as a mask: the lists of a spec become bits, which kernels read as they read any captured tensor.

Stage: analyse, first. In: an ``AttentionSpec``. Out: ``lowered``, one without a selection: its mask asks for the bit of
the key's block, and kernels are given tensors of bits in the place of the lists; ``selection_of`` says what they hold.

    bits    i32[…, ceildiv(Nk, 32 · block)]              as the lists have it, a bit for each block
    tiles   bool[B, H, ceildiv(Nq, 64), ceildiv(Nk, …)]  whether any of 64 queries reads any of some 64 keys

A number outside of the blocks sets no bit and one that occurs twice sets one, whatever reads them. The second tensor
follows from the first and says nothing new of a pair; of a tile it is what ranges decide by, so that kernels visit the
union of what the rows of a tile select, and the backward pass those queries that select a key of its tile. It is left
out where which list a query has depends on lengths or params, which sequences of a batch have of their own: then each
tile is visited. ``op/selected.py`` makes both.

Scores of -inf are masks, too: ``split_masked_score`` finds the condition on positions under which a pair is kept.
Kernels look at it tile by tile, before there is a score, so that it may read positions, sizes, params and captured
tensors only. A condition on the score itself stays in the score, as -inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flashgen.analysis.simplify import make, simplify
from flashgen.ir.build import apply
from flashgen.ir.expr import (
    Apply,
    Expr,
    Literal,
    Load,
    Symbol,
    SymbolKind,
    index,
    index_set,
    literal,
    size,
    substitute,
    walk,
)
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Schedule, Select
from flashgen.ir.types import ElementType, ScalarType

WORD = 32  # bits of an element
TILE = 64  # queries that are looked at together, and keys where blocks are no larger
_OF_A_CALL = frozenset({"B", "H", "Hkv", "D", "Dv"})  # sizes that all sequences of a batch share


@dataclass(frozen=True)
class Selection:
    """The tensors that are made of the lists of a spec.

    ``tiles`` None: there is no such tensor. ``columns`` is the number of keys for each of its elements, a multiple of
    the block; ``axes`` are its other dimensions: b, h or hkv, and i. ``tensors`` are all captured tensors of kernels:
    those of the spec, without lists that nothing else reads, and then the made ones.
    """

    select: Select
    bits: CapturedTensor
    tiles: CapturedTensor | None
    axes: tuple[str, ...]
    columns: int
    tensors: tuple[CapturedTensor, ...]

    @property
    def reads(self) -> frozenset[str]:
        """The captured tensors from which they are made."""
        loads = {node.tensor for node in walk(*self.select.indices) if isinstance(node, Load)}
        return frozenset({self.select.tensor, *loads})

    @property
    def made(self) -> tuple[CapturedTensor, ...]:
        """The tensors that are made of the lists."""
        return tuple(each for each in self.tensors if each in (self.bits, self.tiles))


@dataclass(frozen=True)
class ListedBlocks:
    """How kernels read lists: ``first`` is the first number of a query's list; blocks have ``block`` keys."""

    first: Load
    block: int

    @property
    def axis(self) -> int:
        """The dimension of the tensor whose elements are a list."""
        return len(self.first.indices) - 1


@functools.lru_cache(maxsize=256)
def selection_of(spec: AttentionSpec) -> Selection | None:
    """The tensors made of the lists; None for a spec without lists."""
    select = spec.select
    if select is None:
        return None
    listed = next(each for each in spec.tensors if each.name == select.tensor)
    words = _parts("Nk", WORD * select.block)
    taken = {each.name for each in spec.tensors} | {each.name for each in spec.params}
    name, shape = _free(f"bits_{listed.name}", taken), (*listed.shape[:-1], words)
    bits = CapturedTensor(name, ElementType.I32, shape, grad=False, made_of=listed.name)
    columns = select.block * -(-TILE // select.block)
    axes, tiles = tuple(_axes(select)), None
    if _is_of_a_call(select):
        shape = (*(_EXTENTS[axis] for axis in axes), _parts("Nk", columns))
        name = _free(f"tiles_{listed.name}", taken)
        tiles = CapturedTensor(name, ElementType.BOOL, shape, grad=False, made_of=listed.name, of_tiles=True)
    still_read = {node.tensor for node in walk(*spec.expressions, *select.indices) if isinstance(node, Load)}
    tensors = tuple(each for each in spec.tensors if each.name != select.tensor or each.name in still_read)
    made = (bits,) if tiles is None else (bits, tiles)
    return Selection(select, bits, tiles, axes, columns, (*tensors, *made))


def lowered(spec: AttentionSpec) -> AttentionSpec:
    """The same attention with its selection as a condition of the mask; a spec without one as it is."""
    found = selection_of(spec)
    if found is None:
        return spec
    mask = spec.mask if found.tiles is None else apply("and", spec.mask, _of_tile(found))
    return replace(spec, mask=apply("and", mask, _of_pair(found)), select=None, tensors=found.tensors)


def read_of_calls(spec: AttentionSpec, names: Iterable[str]) -> frozenset[str]:
    """The captured tensors of a call that are needed for the tensors with these names of the lowered spec."""
    found, wanted = selection_of(spec), frozenset(names)
    made = frozenset() if found is None else frozenset(each.name for each in found.made)
    return wanted if found is None or not made & wanted else wanted - made | found.reads


def selected(keep: Expr, tensors: Iterable[CapturedTensor]) -> Expr | None:
    """The condition of a lowered spec's mask that reads the bit; None where there is none."""
    bits = {each.name for each in tensors if each.made_of is not None and not each.of_tiles}
    reads = (each for each in conjuncts(keep) if any(isinstance(x, Load) and x.tensor in bits for x in walk(each)))
    return next(reads, None)


def block_of(tensors: Iterable[CapturedTensor]) -> int:
    """The number of keys in a block of a lowered spec with a selection."""
    bits = next(each for each in tensors if each.made_of is not None and not each.of_tiles)
    return max(int(node.value) for node in walk(bits.shape[-1]) if isinstance(node, Literal)) // WORD


def has_list_for_each_query(tensors: Iterable[CapturedTensor]) -> bool:
    """Whether each query of a lowered spec has a list of its own, not one for a block of queries."""
    return any(each.made_of is not None and not each.of_tiles and size("Nq") in each.shape for each in tensors)


def reads_tiles(keep: Expr, tensors: Iterable[CapturedTensor]) -> bool:
    """Whether the mask of a lowered spec also reads ``tiles``."""
    tiles = {each.name for each in tensors if each.of_tiles}
    return any(isinstance(node, Load) and node.tensor in tiles for node in walk(keep))


def list_read(select: Select) -> Load:
    """The list of a query, as an expression: a read without an index for the last dimension."""
    return Load(ScalarType.INT, tensor=select.tensor, indices=select.indices, span=select.span)


def first_number(select: Select) -> Load:
    """The first number of a query's list."""
    return Load(ScalarType.INT, tensor=select.tensor, indices=(*select.indices, literal(0)), span=select.span)


def _of_pair(found: Selection) -> Expr:
    """The bit of the key's block, as a condition."""
    block = apply("floordiv", index("j"), literal(found.select.block))
    word = apply("floordiv", index("j"), literal(WORD * found.select.block))
    bits = Load(ScalarType.INT, tensor=found.bits.name, indices=(*found.select.indices, word))
    moved = apply("shr", bits, apply("mod", block, literal(WORD)))
    return apply("ne", apply("bitand", moved, literal(1)), literal(0))


def _of_tile(found: Selection) -> Expr:
    assert found.tiles is not None
    rows = (apply("floordiv", index("i"), literal(TILE)) if axis == "i" else index(axis) for axis in found.axes)
    place = (*rows, apply("floordiv", index("j"), literal(found.columns)))
    return Load(ScalarType.BOOL, tensor=found.tiles.name, indices=place)


def _parts(name: str, length: int) -> Expr:
    return apply("ceildiv", size(name), literal(length))


_EXTENTS = {"b": size("B"), "h": size("H"), "hkv": size("Hkv"), "i": _parts("Nq", TILE)}


def _axes(select: Select) -> Iterator[str]:
    """The indices that a query's list depends on; key/value heads stand for query heads where these do not matter."""
    axes = frozenset[str]().union(*map(index_set, select.indices))
    if "b" in axes:
        yield "b"
    if "h" in axes:
        yield "h" if index("h") in set(walk(*select.indices)) else "hkv"
    if "i" in axes:
        yield "i"


def _is_of_a_call(select: Select) -> bool:
    """Whether a query has the same list in a ragged batch as in a call of its own, whatever the lengths."""
    kinds = (SymbolKind.PARAM, SymbolKind.SIZE)
    own = (node for node in walk(*select.indices) if isinstance(node, Symbol) and node.kind in kinds)
    return all(node.name in _OF_A_CALL and node.kind is SymbolKind.SIZE for node in own)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


# An H200's time for dK, dV and dQ, 32k causal, 16 blocks of 64 a query, 16 heads: 64 × 64 by a warpgroup 47.8 ms,
# 32 × 64 by four warps 38.6, 16 × 64 14.0: two queries that share a tile visit each other's keys, and mask them.
_TILES = Schedule(backward_Br=16, backward_Bc=64)
_WIDEST = 128  # head dimension for which that is known


@functools.lru_cache(maxsize=64)
def by_groups(spec: AttentionSpec, group: int, *, narrow: bool) -> AttentionSpec:
    """The same attention with the query heads of a key/value head as rows, by which lists for each query are computed.

    Row i · group + n of a head of keys is query i of the n-th head of its group: the rows of a tile belong to few
    queries, which together select few keys. Tensors and params keep their shapes. ``narrow``: q, k and v have 16 bits.
    Raises ``ValueError`` for a layout, and for dropout.
    """
    if spec.layout is not None or spec.dropout is not None:
        raise ValueError(f"'{spec.name}' draws blocks, or drops pairs, by the positions of a head")
    count = literal(group)
    known: dict[Expr, Expr] = {
        index("i"): apply("floordiv", index("i"), count),
        index("h"): apply("add", apply("mul", index("hkv"), count), apply("mod", index("i"), count)),
        size("H"): apply("mul", size("H"), count),
        size("Nq"): apply("ceildiv", size("Nq"), count),
    }

    def of_rows(expr: Expr) -> Expr:
        return substitute(expr, known)

    weights, select = spec.weights, spec.select
    expression = None if weights.expression is None else of_rows(weights.expression)
    widest = max(max(each.qk, each.v) for each in spec.head_dims)
    is_known = narrow and widest <= _WIDEST and spec.schedule == Schedule()
    return replace(
        spec,
        name=f"{spec.name}_by_{group}",
        params=tuple(replace(x, default=None if x.default is None else of_rows(x.default)) for x in spec.params),
        tensors=tuple(replace(x, shape=tuple(map(of_rows, x.shape))) for x in spec.tensors),
        scale=of_rows(spec.scale),
        score=of_rows(spec.score),
        mask=of_rows(spec.mask),
        weights=weights.over(expression),
        schedule=_TILES if is_known else spec.schedule,
        select=None if select is None else replace(select, indices=tuple(map(of_rows, select.indices))),
    )


# Masks that are written as scores of -inf -----------------------------------------------------------------------------


_MINUS_INFINITY = literal(-math.inf)
_TRUE, _FALSE = literal(True), literal(False)


def split_masked_score(score: Expr) -> tuple[Expr, Expr]:
    """The score, and the condition on positions under which a pair is kept; where it is false the score was -inf.

    ``where(c, s, -inf)`` is (s, c), at the top, within branches, sums and minima: a sum with -inf is -inf, but for
    +inf and NaN, which are no scores. Where c reads the score, the part of it that does stays, around the whole score,
    and what has to hold of positions for c to hold is the condition. Everything else is (score, true).
    """
    found = _Splitter().split(simplify(score))
    return simplify(make("where", found.by_score, found.score, _MINUS_INFINITY)), simplify(found.keep)


@dataclass(frozen=True)
class _Split:
    """A score that is ``score`` where both conditions hold, else -inf. ``keep`` does not read the score."""

    score: Expr
    by_score: Expr = _TRUE
    keep: Expr = _TRUE


class _Splitter:
    """Splits scores and conditions; parts are cached, as ``let`` shares them."""

    def __init__(self) -> None:
        self._reads: dict[Expr, bool] = {}
        self._splits: dict[Expr, _Split] = {}
        self._needs: dict[tuple[Expr, bool], Expr] = {}

    def split(self, score: Expr) -> _Split:
        """The split of a part of the score."""
        if score not in self._splits:
            self._splits[score] = self._split(score)
        return self._splits[score]

    def _split(self, score: Expr) -> _Split:
        if score == _MINUS_INFINITY:
            return _Split(literal(0.0), keep=_FALSE)
        match score:
            case Apply(op="where", args=(c, x, y)):
                return self._choice(c, self.split(x), self.split(y))
            case Apply(op="add" | "min" as op, args=(x, y)):
                one, other = self.split(x), self.split(y)
                by_score = make("and", one.by_score, other.by_score)
                return _Split(make(op, one.score, other.score), by_score, make("and", one.keep, other.keep))
            case Apply(op="sub", args=(x, y)):
                one = self.split(x)
                return replace(one, score=make("sub", one.score, y))
        return _Split(score)

    def _choice(self, c: Expr, x: _Split, y: _Split) -> _Split:
        if x.keep == _FALSE:
            return self._only(make("not", c), y)
        if y.keep == _FALSE:
            return self._only(c, x)
        score, by_score = make("where", c, x.score, y.score), make("where", c, x.by_score, y.by_score)
        if x.keep == y.keep:
            return _Split(score, by_score, x.keep)
        if not self._reads_score(c):
            return _Split(score, by_score, make("where", c, x.keep, y.keep))
        by_score = make("where", c, make("and", x.keep, x.by_score), make("and", y.keep, y.by_score))
        return _Split(score, by_score, make("or", x.keep, y.keep))

    def _only(self, c: Expr, split: _Split) -> _Split:
        """The score, with -inf where ``c`` does not hold."""
        by_score, keep = split.by_score, split.keep
        for part in reversed(conjuncts(c)):
            keep = make("and", self._needed(part, True), keep)
            if self._reads_score(part):
                by_score = make("and", part, by_score)
        return _Split(split.score, by_score, keep)

    def _needed(self, condition: Expr, value: bool) -> Expr:
        """The condition on positions wherever ``condition`` is ``value``, as far as it is known without the score."""
        wanted = (condition, value)
        if wanted not in self._needs:
            self._needs[wanted] = self._need(condition, value)
        return self._needs[wanted]

    def _need(self, condition: Expr, value: bool) -> Expr:
        if not self._reads_score(condition):
            return condition if value else make("not", condition)
        match condition:
            case Apply(op="not", args=(x,)):
                return self._needed(x, not value)
            case Apply(op="and" | "or" as op, args=(x, y)):
                one, other = self._needed(x, value), self._needed(y, value)
                return make("and" if (op == "and") is value else "or", one, other)
            case Apply(op="where", args=(c, x, y)):
                first = make("and", self._needed(c, True), self._needed(x, value))
                return make("or", first, make("and", self._needed(c, False), self._needed(y, value)))
        return _TRUE

    def _reads_score(self, expr: Expr) -> bool:
        if expr not in self._reads:
            is_score = isinstance(expr, Symbol) and expr.kind is SymbolKind.SCORE
            self._reads[expr] = is_score or any(self._reads_score(child) for child in expr.children)
        return self._reads[expr]


def conjuncts(condition: Expr) -> tuple[Expr, ...]:
    """Conditions whose conjunction is this one."""
    match condition:
        case Apply(op="and", args=(x, y)):
            return (*conjuncts(x), *conjuncts(y))
        case Apply(op="not", args=(Apply(op="or", args=(x, y)),)):
            return (*conjuncts(make("not", x)), *conjuncts(make("not", y)))
    return (condition,)
