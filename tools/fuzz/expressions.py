"""Random expressions: every operator of the table over every name that may stand in a place.

In: a source of chance, what a place offers. Out: ``Node``s. Operators, the types that they take and the values that
they may have come from the operator table, so that a row that is added there is drawn here. What the table says of
ranges keeps values in a size at which float32 is accurate: arguments are bent into an operator's domain by functions
that have no step, and results that could grow large are bent back.

Steps (floor, comparisons of floats) are drawn too. Where an input lies within rounding of one, two precisions may
rightly disagree: ``rounding.py`` tells such a disagreement from a wrong kernel.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flashgen.ir.interval import FULL_BOOL, FloatRange, IntRange, Range
from flashgen.ir.operators import OPERATORS, Operator, TypingError
from flashgen.ir.types import ScalarType
from tools.fuzz.nodes import BOOL, FLOAT, INT, Node, leaf, number

# The largest float that an expression may have, so that chains of them stay accurate.
LARGEST = 8.0
_WORDS = frozenset({"and", "or", "not"})
# Where an operator's samples include points that no program should come near: poles, and quotients without a bound.
_DOMAINS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "div": ((-8.0, 8.0), (0.5, 8.0)),
    "floordiv": ((-8.0, 8.0), (0.5, 8.0)),
    "mod": ((-8.0, 8.0), (0.5, 8.0)),
    "pow": ((0.2, 3.0), (-2.0, 2.0)),
}
# Large arguments of these are all but equal in two precisions, and their values are not.
_WHOLE = frozenset({"hash"})
_HASH_MOST = 4


@dataclass(frozen=True)
class Place:
    """What a place of a spec offers: names by type, and functions that read something there, drawn as often as asked.

    ``steps`` is the share of float operators with steps that may be drawn; 0 where none may.
    """

    leaves: Mapping[ScalarType, Sequence[Node]]
    readers: Mapping[ScalarType, Sequence[Callable[[Expressions, int], Node]]]
    steps: float = 0.25


@dataclass(frozen=True)
class Use:
    """One operator with the types of its arguments and of its result."""

    operator: Operator
    arguments: tuple[ScalarType, ...]
    result: ScalarType


@functools.cache
def uses() -> Mapping[ScalarType, tuple[tuple[Use, ...], ...]]:
    """For each type, the operators that give it, each with every choice of arguments that the table takes."""
    found: dict[ScalarType, list[tuple[Use, ...]]] = {BOOL: [], INT: [], FLOAT: []}
    for operator in OPERATORS.values():
        by_result: dict[ScalarType, list[Use]] = {}
        counts = (operator.arity,) if operator.arity >= 0 else range(1, _HASH_MOST)
        for types in itertools.chain.from_iterable(itertools.product((BOOL, INT, FLOAT), repeat=n) for n in counts):
            try:
                result = operator.signature(types).result
            except TypingError:
                continue
            by_result.setdefault(result, []).append(Use(operator, types, result))
        for result, each in by_result.items():
            found[result].append(tuple(each))
    return {result: tuple(each) for result, each in found.items()}


def has_steps(use: Use) -> bool:
    """Whether a small change of a float argument can change the result by much."""
    return FLOAT in use.arguments and (
        use.result is not FLOAT or use.operator.name in ("floor", "ceil", "round", "floordiv", "mod", "sign")
    )


class Expressions:
    """Draws expressions of a place."""

    def __init__(self, chance: random.Random, place: Place) -> None:
        self.chance = chance
        self.place = place

    def draw(self, scalar: ScalarType, depth: int) -> Node:
        """An expression of this type, of at most so many operators one in another."""
        readers = self.place.readers.get(scalar, ())
        if depth <= 0 or self.chance.random() < 0.2:
            return self.simple(scalar, depth)
        if readers and self.chance.random() < 0.25:
            return self.chance.choice(readers)(self, depth - 1)
        return self._applied(scalar, depth)

    def simple(self, scalar: ScalarType, depth: int = 0) -> Node:
        """A name, a number, or something that is read."""
        readers, leaves = self.place.readers.get(scalar, ()), self.place.leaves.get(scalar, ())
        kinds = [*(["read"] * 2 * bool(readers)), *(["leaf"] * 2 * bool(leaves)), "literal"]
        match self.chance.choice(kinds):
            case "read":
                return self.chance.choice(readers)(self, max(depth - 1, 0))
            case "leaf":
                return self.chance.choice(leaves)
        return self.literal(scalar)

    def literal(self, scalar: ScalarType) -> Node:
        """A number, or a truth value; as a comparison of ints now and then, so that conditions are seldom constant."""
        if scalar is FLOAT:
            return number(self.chance.choice((0.5, 1.0, 2.0, 0.1, -0.3, 1.75, 3.0, -1.0, 1e-3)))
        if scalar is INT:
            return number(self.chance.choice((0, 1, 2, 3, 5, 7, 8, 16, 31, -1, -4)))
        ints = self.place.leaves.get(INT, ())
        if ints and self.chance.random() < 0.8:
            sign = self.chance.choice(("<", "<=", ">", ">=", "==", "!="))
            return Node(BOOL, f"({{0}} {sign} {{1}})", (self.chance.choice(ints), self.literal(INT)))
        return leaf(BOOL, self.chance.choice(("true", "false")))

    def _applied(self, scalar: ScalarType, depth: int) -> Node:
        choices = uses()[scalar]
        while True:
            use = self.chance.choice(self.chance.choice(choices))
            if not has_steps(use) or self.chance.random() < self.place.steps:
                return self.apply(use, depth)

    def apply(self, use: Use, depth: int) -> Node:
        """An operator over arguments that are drawn, each within its domain."""
        operator = use.operator
        promoted = operator.signature(use.arguments).arguments
        domains = _DOMAINS.get(operator.name, operator.samples.floats)
        children = []
        for place, (scalar, wanted) in enumerate(zip(use.arguments, promoted, strict=True)):
            child = self.draw(scalar, depth - 1 - (self.chance.random() < 0.3))
            if operator.name == "ipow" and place == 1 and _is_negative(child):  # a power of floats
                child = number(2)
            if wanted is FLOAT and operator.name != "where":
                low, high = domains[place] if place < len(domains) else (-LARGEST, LARGEST)
                child = self.within(child, low, high)
            children.append(child)
        ranges = [_promoted(child, wanted) for child, wanted in zip(children, promoted, strict=True)]
        # Of bools the table's ranges are those of ``and`` and ``or``, which stand for ``&`` and ``|`` in the IR.
        values = FULL_BOOL if use.result is BOOL else operator.interval(*ranges)
        drawn = Node(use.result, self._spelt(use), tuple(children), values)
        return self.within(drawn, -LARGEST, LARGEST) if use.result is FLOAT else drawn

    def _spelt(self, use: Use) -> str:
        name, count = use.operator.spelling, len(use.arguments)
        places = [f"{{{n}}}" for n in range(count)]
        if use.operator.name == "where" and self.chance.random() < 0.5:
            return "({1} if {0} else {2})"
        if use.operator.name in ("pow", "ipow") and self.chance.random() < 0.3:
            return "pow({0}, {1})"
        if name.isidentifier() and name not in _WORDS:
            return f"{name}({', '.join(places)})"
        return f"({places[0]} {name} {places[1]})" if count == 2 else f"({name} {places[0]})"

    def within(self, node: Node, low: float, high: float) -> Node:
        """The same, as a float that is surely between two numbers; unchanged where it is."""
        known = _promoted(node, FLOAT)
        if isinstance(known, FloatRange) and low <= known.lo and known.hi <= high and not known.may_be_nan:
            return node
        if node.type is INT:
            return self._small(node, low, high)
        bent = FloatRange(low, high)
        middle, half = number((low + high) / 2), number((high - low) / 2)
        ways = ["({1} + {2} * sin({0}))", "({1} + {2} * tanh({0} / {2}))", "clamp({0}, {3}, {4})"]
        if low == -high:
            ways += ["{2} * tanh({0} / {2})", "softcap({0}, {2})", "({0} / (1 + abs({0}) / {2}))"]
        wild = not isinstance(known, FloatRange) or known.may_be_nan or max(-known.lo, known.hi) > 1e4
        # What is not known to be small may be infinite: only what forgets its size helps.
        way = "clamp({0}, {3}, {4})" if wild else self.chance.choice(ways)
        way = way if way.startswith(("(", "clamp", "softcap")) else f"({way})"
        return Node(FLOAT, way, (node, middle, half, number(float(low)), number(float(high))), bent)

    def _small(self, node: Node, low: float, high: float) -> Node:
        """An int of any size as a float between two numbers: a fraction of what is left of a small division."""
        parts = self.chance.choice((2, 3, 5, 8, 17))
        step = round((high - low) / parts, 3) or (high - low) / parts
        inside = FloatRange(low, low + step * (parts - 1))
        return Node(FLOAT, "({1} + {2} * ({0} % {3}))", (node, number(float(low)), number(step), number(parts)), inside)


def _is_negative(node: Node) -> bool:
    """Whether an int is surely negative: a constant, perhaps, once it is folded."""
    return isinstance(node.range, IntRange) and node.range.hi < 0


def _promoted(node: Node, wanted: ScalarType) -> Range:
    """The range of an argument after promotion."""
    if wanted is FLOAT and isinstance(node.range, IntRange):
        return FloatRange(float(node.range.lo), float(node.range.hi))
    return node.range
