"""What a pair costs: flops of the matrix products, special functions, and everything else, as the formula asks for it.

In: a ``Variant``. Out: ``PairWork`` by pass. Counted from the expressions that kernels evaluate for each pair; what
depends on the row or the column alone is computed once for many and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal as OneOf

from flashgen.analysis.factors import factor_of_dot
from flashgen.analysis.levels import Level, kept_level, level_of
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Apply, Expr, Load, Symbol, SymbolKind, walk
from flashgen.ir.operators import OPERATORS

PassName = OneOf["forward", "keys", "queries"]

# (special functions, other instructions) of each operator.
Costs = Mapping[str, tuple[int, int]]
COSTS: Costs = MappingProxyType({name: (row.cost.specials, row.cost.others) for name, row in OPERATORS.items()})
CPU_COSTS: Costs = MappingProxyType({name: row.cost.on_cpus or COSTS[name] for name, row in OPERATORS.items()})
# Beside the formula: per pair the maximum, the product with the factor and the sum of a softmax, rounding to 16 bits.
_SOFTMAX_PLAIN, _ROUNDING = 3, 1
_A_READ = 8  # instructions that a read from the L1 cache is worth


@dataclass(frozen=True)
class PairWork:
    """Of one pair: ``products`` of how many numbers each, special functions, other instructions, those of the mask.

    ``mask`` is added in PARTIAL tiles only. ``products`` are the inner dimensions of the matrix products: a product
    over d numbers is 2 d flops.
    """

    products: tuple[int, ...]
    specials: float
    others: float
    mask: float

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return 2 * sum(self.products)


def pair_work(variant: Variant, name: PassName, costs: Costs = COSTS) -> PairWork:
    """The work of one pass. ``keys`` is the backward kernel of dK and dV, without the product of dQ."""
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    mask = _cost([variant.keep], {}, costs)
    if name == "forward":
        special, other = _weight_cost(variant, costs)
        return PairWork((D, Dv), special, other + _ROUNDING, sum(mask))
    roots: list[Expr] = [variant.score_by_dot]
    roots += [each for each in (variant.score_by_sqdist, variant.weight_by_score) if each is not None]
    special, other = _weight_cost(variant, costs)
    more_special, more = _cost(roots, _evaluated([variant.score]), costs)
    for gradient in variant.gradients:
        parts = [each for each in (gradient.from_score, gradient.from_weight) if each is not None]
        if parts and gradient.level in _LEVELS_OF[name]:
            extra_special, extra = _cost(parts, _evaluated([variant.score, *roots]), costs)
            more_special, more = more_special + extra_special, more + extra + 2
    # dP - D, its product with P, P and dS rounded.
    return PairWork(_PRODUCTS[name](D, Dv), special + more_special, other + more + 2 + 2 * _ROUNDING, sum(mask))


_LEVELS_OF: Mapping[str, tuple[Level, ...]] = MappingProxyType(
    {"queries": (Level.ROW,), "keys": (Level.PAIR, Level.DIAGONAL, Level.COLUMN, Level.HEAD, Level.LAUNCH)}
)
_PRODUCTS: Mapping[str, Callable[[int, int], tuple[int, ...]]] = MappingProxyType(
    {
        "keys": lambda D, Dv: (D, Dv, Dv, D),  # S, dP, dV, dK
        "queries": lambda D, Dv: (D, Dv, D),  # S, dP, dQ
    }
)


def _weight_cost(variant: Variant, costs: Costs) -> tuple[float, float]:
    """Special functions and other instructions from the product to the weight."""
    if variant.weights.weight is None:
        if factor_of_dot(variant.score) is not None:
            return 1, _SOFTMAX_PLAIN
        special, other = _cost([variant.score], {}, costs)
        return special + 1, other + _SOFTMAX_PLAIN
    special, other = _cost([variant.score, variant.weights.weight], {}, costs)
    return special, other + 1


def _evaluated(roots: Iterable[Expr]) -> dict[Expr, None]:
    return dict.fromkeys(node for root in roots for node in walk(root))


def _cost(roots: Iterable[Expr], known: Mapping[Expr, None], costs: Costs) -> tuple[float, float]:
    """Special functions and other instructions of the nodes that change with the pair."""
    special = other = 0.0
    for node in _evaluated(roots):
        if node in known or not _is_of_pairs(node):
            continue
        if isinstance(node, Load):
            other += 2  # the address, and the load
        elif isinstance(node, Apply):
            more_special, more = costs[node.op]
            special, other = special + more_special, other + more
    return special, other


def takes_longer_than_a_read(expr: Expr) -> bool:
    """Whether a function of the distance is more than a few instructions: it reads memory, or has special functions."""
    for node in walk(expr):
        if level_of(node) is not Level.DIAGONAL:
            continue
        special, other = COSTS[node.op] if isinstance(node, Apply) else (0, 0)
        if isinstance(node, Load) or special or other > _A_READ:
            return True
    return False


def _is_of_pairs(node: Expr) -> bool:
    return kept_level(node) is Level.PAIR or any(
        isinstance(each, Symbol) and each.kind is SymbolKind.SCORE for each in walk(node)
    )
