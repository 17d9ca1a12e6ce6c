"""Decides for every index of every captured tensor how a kernel stays inside: by proof, by a check, or by clamping.

Stage: analyse. In: an ``AttentionSpec`` and a ``HeadDim``. Out: one ``IndexProof`` for each index of each load, as
kernels see the load (sizes D and Dv literal, block coordinates written as i // block, simplified). The decision:

    BARE       inside for all sizes
    GUARDED    inside wherever the branch that reads it is taken and the mask keeps the pair; elsewhere the value is
               not used, and the kernel clamps without a word
    OUTSIDE    outside for all sizes: an error
    CALL_TIME  the range is driven by sizes, and for some sizes it is inside: the op checks when it is called
    CLAMPED    none of these: the kernel clamps, and a warning says so

``bounds`` (the range of an expression) is in ``ranging.py``. Does NOT evaluate tiles (``tiles.py``) and does NOT speak
to users (``index_checks.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

from flashgen.analysis.prover import SIZE_LIMIT, SIZE_OF, Prover, symbol_ranges
from flashgen.analysis.ranging import NO_FACTS, RangeEvaluator
from flashgen.analysis.selection import list_read
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
from flashgen.ir.interval import IntRange, Range
from flashgen.ir.interval_float import point
from flashgen.ir.spec import AttentionSpec, HeadDim, Layout
from flashgen.ir.types import ScalarType

_NOT_BY_SIZES = 2**20  # a range inside ± this, over all sizes, does not come from the sizes
_MAX_CONTEXTS = 8  # sets of conditions kept apart for one load; beyond, what they share
_MAX_SAMPLES = 300
_SMALL, _FEW_BOXES = 16, 150  # lengths at which pairs are looked at, and in how many boxes
_PARAM_VALUES = (1, 0, 2, 16)
_PROVED = 8  # boxes, large ones first, for which more than ranges is tried

Context = frozenset[Expr]  # conditions that hold together


class IndexStatus(Enum):
    """How an index is kept inside its dimension."""

    BARE = "bare"
    GUARDED = "guarded"
    CALL_TIME = "call time"
    CLAMPED = "clamped"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class IndexProof:
    """The proof for one index of one load. ``contexts`` are the sets of conditions under which the value is used.

    ``found`` is the range over all sizes where the value is used. ``guarded``: the proof, at call time or before,
    relies on the conditions, so that the kernel clamps the index where they do not hold.
    """

    load: Load
    dimension: int
    extent: Expr
    status: IndexStatus
    guarded: bool
    contexts: tuple[Context, ...]
    found: IntRange

    @property
    def position(self) -> Expr:
        return self.load.indices[self.dimension]

    @property
    def clamp(self) -> bool:
        return self.guarded or self.status in (IndexStatus.CLAMPED, IndexStatus.OUTSIDE)

    @property
    def params(self) -> frozenset[Symbol]:
        """The params that a proof at call time needs."""
        return _params(self.position, *((c for context in self.contexts for c in context) if self.guarded else ()))


def clamped_dimensions(load: Load, proofs: Iterable[IndexProof]) -> tuple[bool, ...]:
    """For each index of a load in a kernel, whether it is clamped; a load without proofs is clamped throughout."""
    known = {proof.dimension: proof.clamp for proof in proofs if proof.load == load}
    return tuple(known.get(dimension, True) for dimension in range(len(load.indices)))


def prove_indices(spec: AttentionSpec, head_dim: HeadDim) -> tuple[IndexProof, ...]:
    """A proof for each index of each distinct load of the spec, in the order of reading."""
    values = known_symbols(head_dim, spec.layout)

    def rewrite(expr: Expr) -> Expr:
        return simplify(substitute(expr, values))

    contexts: dict[Load, set[Context]] = {}
    for root, condition in _roots(spec):
        for load, found in _contexts(rewrite(root), frozenset({rewrite(condition)})).items():
            contexts.setdefault(load, set()).update(found)
    shapes = {tensor.name: tuple(rewrite(extent) for extent in tensor.shape) for tensor in spec.tensors}
    constants = [value for _, value in spec.constants if isinstance(value, int)]
    return tuple(
        _prove(load, dimension, extent, _fewest(contexts[load]), constants)
        for load in contexts
        for dimension, extent in enumerate(shapes[load.tensor][: len(load.indices)])
    )


def known_symbols(head_dim: HeadDim, layout: Layout | None) -> dict[Expr, Expr]:
    """Substitutions for symbols in kernels: D and Dv are numbers, I is i // block, J is j // block."""
    values: dict[Expr, Expr] = {size("D"): literal(head_dim.qk), size("Dv"): literal(head_dim.v)}
    if layout is not None:
        for block_name, index_name in (("I", "i"), ("J", "j")):
            block = Symbol(ScalarType.INT, name=block_name, kind=SymbolKind.BLOCK)
            values[block] = apply("floordiv", index(index_name), literal(layout.block))
    return values


def _roots(spec: AttentionSpec) -> Iterator[tuple[Expr, Expr]]:
    """(expression, the condition under which its value is used)."""
    keep = spec.mask
    yield spec.mask, literal(True)
    if spec.layout is not None:
        keep = apply("and", spec.layout.keep, spec.mask)
        yield spec.layout.keep, literal(True)
    yield spec.score, keep
    if spec.select is not None:
        yield list_read(spec.select), keep
    if spec.weights.weight is not None:
        yield spec.weights.weight, keep
    if spec.weights.sink is not None:
        yield spec.weights.sink, literal(True)


# Where loads stand ----------------------------------------------------------------------------------------------------


def _contexts(root: Expr, outside: Context) -> dict[Load, set[Context]]:
    """Every load below ``root``, with the sets of conditions under which it is used."""
    contexts: dict[Expr, set[Context]] = {root: {outside}}
    loads: dict[Load, set[Context]] = {}
    for node in reversed(tuple(walk(root))):  # parents before children
        held = _fewest(contexts[node])
        if isinstance(node, Load):
            loads[node] = set(held)
        for k, child in enumerate(node.children):
            implied = _implied(node, k)
            contexts.setdefault(child, set()).update(context | implied for context in held)
    return dict(reversed(loads.items()))


def _implied(node: Expr, k: int) -> Context:
    """The conditions that hold where argument k of the node is used."""
    match node, k:
        case Apply(op="where", args=(c, _, _)), 1:
            return frozenset({c})
        case Apply(op="where", args=(c, _, _)), 2:
            return frozenset({make("not", c)})
        case Apply(op="and", args=(x, _)), 1:
            return frozenset({x})
        case Apply(op="or", args=(x, _)), 1:
            return frozenset({make("not", x)})
    return frozenset()


def _fewest(contexts: set[Context]) -> tuple[Context, ...]:
    """The weakest contexts: a proof under these is a proof under all."""
    kept = [context for context in contexts if not any(other < context for other in contexts)]
    if len(kept) > _MAX_CONTEXTS:
        kept = [frozenset.intersection(*kept)]
    return tuple(sorted(kept, key=lambda context: sorted(map(hash, context))))


# The decision ---------------------------------------------------------------------------------------------------------


class Conditions:
    """The facts of each context, for given sizes; contradictory contexts are left out."""

    def __init__(self, contexts: tuple[Context, ...], ranges: Mapping[Expr, Range]) -> None:
        self.evaluator = RangeEvaluator(ranges)
        of_contexts = (self.evaluator.facts(sorted(context, key=lambda c: c.size)) for context in contexts)
        self.facts = tuple(facts for facts in of_contexts if facts is not None)

    def range(self, expr: Expr) -> IntRange:
        """The hull over the contexts."""
        found = [self.evaluator.range(expr, facts) for facts in self.facts or (NO_FACTS,)]
        ends = [r for r in found if isinstance(r, IntRange)]
        return IntRange(min(r.lo for r in ends), max(r.hi for r in ends))

    def surely_inside(self, position: Expr, extent: Expr) -> bool:
        """Whether 0 ≤ position < extent in every context, by ranges."""
        return all(
            _inside(self.evaluator.range(position, facts), self.evaluator.range(extent, facts)) for facts in self.facts
        )

    def inside(self, position: Expr, extent: Expr) -> bool:
        """Whether 0 ≤ position < extent in every context, by a proof."""
        prover = Prover(self.evaluator)
        return all(prover.inside(position, extent, facts) for facts in self.facts)


def _inside(position: Range, extent: Range) -> bool:
    assert isinstance(position, IntRange)
    assert isinstance(extent, IntRange)
    return position.lo >= 0 and position.hi < extent.lo


def _prove(load: Load, dimension: int, extent: Expr, contexts: tuple[Context, ...], constants: list[int]) -> IndexProof:
    position = load.indices[dimension]
    everywhere = (frozenset[Expr](),)
    conditions = Conditions(contexts, symbol_ranges(None))
    found = conditions.range(position)

    def proof(status: IndexStatus, *, guarded: bool = False) -> IndexProof:
        return IndexProof(load, dimension, extent, status, guarded, contexts, found)

    prover = Prover(conditions.evaluator)
    if prover.inside(position, extent):
        return proof(IndexStatus.BARE)
    if conditions.inside(position, extent):
        return proof(IndexStatus.GUARDED, guarded=True)
    if all(prover.outside(position, extent, facts) for facts in conditions.facts):
        return proof(IndexStatus.OUTSIDE)
    conditions_read = () if isinstance(position, Symbol) else (c for context in contexts for c in context)
    params = _params(position, *conditions_read)
    driven_by_sizes = not isinstance(extent, Literal) or max(-found.lo, found.hi) > _NOT_BY_SIZES
    if driven_by_sizes or params:
        samples = tuple(_samples(position, extent, contexts, constants))
        tried = [{**symbol_ranges(sizes), **known} for sizes in samples for known in _values(params)]
        bare = any(Conditions(everywhere, each).surely_inside(position, extent) for each in tried)
        if bare and not params and not _takes_more(position, extent, contexts, samples):
            return proof(IndexStatus.CALL_TIME)
        if bare or any(Conditions(contexts, each).surely_inside(position, extent) for each in tried):
            return proof(IndexStatus.CALL_TIME, guarded=True)
    return proof(IndexStatus.CLAMPED)


def _params(*roots: Expr) -> frozenset[Symbol]:
    return frozenset(node for node in walk(*roots) if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM)


def _values(params: frozenset[Symbol]) -> Iterator[dict[Expr, Range]]:
    for value in _PARAM_VALUES if params else (0,):
        yield {param: number_range(param, value) for param in params}


def number_range(param: Symbol, value: float) -> Range:
    """The range of one number."""
    return IntRange(int(value), int(value)) if param.type is ScalarType.INT else point(float(value))


def _takes_more(
    position: Expr, extent: Expr, contexts: tuple[Context, ...], samples: Iterable[Mapping[str, int]]
) -> bool:
    """Whether, at small sizes, only pairs that the mask drops take the index outside."""
    asked = frozenset[str]().union(*(index_set(condition) for context in contexts for condition in context))
    if not all(contexts) or not asked & index_set(position):
        return False
    lengths = sorted({n for sizes in samples for n in sizes.values()})
    pairs = [(n, m) for n in lengths if n <= _SMALL for m in (n, 2 * n, n // 2)]
    pairs += [(n, n) for n in lengths if n > _SMALL]
    for q_len, kv_len in pairs:
        ranges = symbol_ranges({**dict.fromkeys(SIZE_OF.values(), 2), "Nq": q_len, "Nk": kv_len})
        most = _FEW_BOXES if q_len <= _SMALL else _PROVED
        if (
            uncertain(position, extent, (frozenset(),), ranges, most) is not None
            and uncertain(position, extent, contexts, ranges, most) is None
        ):
            return True
    return False


Box = Mapping[Expr, IntRange]  # ranges of positions


def uncertain(
    position: Expr, extent: Expr, contexts: tuple[Context, ...], whole: Mapping[Expr, Range], most: int
) -> Box | None:
    """Ranges of positions for which the index is not proved to stay inside; empty if that is open after ``most`` boxes.

    ``whole`` are the ranges of positions, sizes and params. None: the index is inside wherever one of the contexts
    holds.
    """
    nodes = set(walk(position, extent, *(condition for context in contexts for condition in context)))
    boxes: list[dict[Expr, Any]] = [{index(name): whole[index(name)] for name in SIZE_OF if index(name) in nodes}]
    for count in range(most):
        if not boxes:
            return None
        box = boxes.pop()
        conditions = Conditions(contexts, {**whole, **box})
        if conditions.surely_inside(position, extent) or (count < _PROVED and conditions.inside(position, extent)):
            continue
        halves = _halves(box)
        if not halves:
            return box
        boxes += halves
    return {} if boxes else None


def _halves(box: dict[Expr, IntRange]) -> list[dict[Expr, IntRange]]:
    """The box cut in two along its longest side; empty for a point."""
    longest = max(box, key=lambda symbol: box[symbol].hi - box[symbol].lo, default=None)
    if longest is None or box[longest].is_point:
        return []
    lo, hi = box[longest].lo, box[longest].hi
    middle = (lo + hi) // 2
    return [{**box, longest: IntRange(lo, middle)}, {**box, longest: IntRange(middle + 1, hi)}]


def _samples(
    position: Expr, extent: Expr, contexts: tuple[Context, ...], constants: list[int]
) -> Iterator[Mapping[str, int]]:
    """Sizes to try: small ones, constants of the spec, their squares and multiples. Lengths are at least 2."""
    conditions = [condition for context in contexts for condition in context]
    nodes = list(walk(position, extent))
    seen = {abs(int(n.value)) for n in nodes if isinstance(n, Literal) and n.type is ScalarType.INT}
    seen |= {abs(value) for value in constants}
    interesting = sorted(value for value in seen if 1 <= value <= 2**15)[:6]
    values = {2, 3, 8, 64, 1024} | set(interesting) | {2 * v for v in interesting} | {v * v for v in interesting}
    values |= {v * w for v, w in product(interesting[:3], repeat=2)}
    used = {n.name for n in walk(position, extent, *conditions) if isinstance(n, Symbol)}
    free = [name for name, of in SIZE_OF.items() if {name, of} & used]
    for count, chosen in enumerate(product(sorted(v for v in values if 2 <= v < SIZE_LIMIT), repeat=min(len(free), 2))):
        if count >= _MAX_SAMPLES:
            return
        # With more than two sizes in play the others follow the first.
        extents = {SIZE_OF[name]: chosen[min(k, len(chosen) - 1)] for k, name in enumerate(free)}
        yield {name: extents.get(name, 2) for name in SIZE_OF.values()}
