"""Stage 4b: print the kept pairs of a tile as interval arithmetic in C++.

In: the boolean that says which pairs are kept, and the names of ranges that the kernel observes while it runs. Out:
straight-line code over ranges of ``i`` and ``j``. What does not depend on i or j is a point; an element of a captured
tensor that does is in the range that was observed over the rows or columns of the tile, or may be anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.analysis.levels import Level, level_of
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_range
from flashgen.ir.expr import Apply, Expr, Load, Symbol, walk
from flashgen.ir.types import ScalarType

_ANYTHING = {
    ScalarType.BOOL: "fg::ranges::any_bool()",
    ScalarType.INT: "fg::ranges::any_int()",
    ScalarType.FLOAT: "fg::ranges::any_float()",
}


@dataclass(frozen=True)
class RangeCode:
    """Statements, then the expression of the result."""

    lines: tuple[str, ...]
    result: str


def observable_loads(keep: Expr) -> tuple[Load, ...]:
    """The elements whose range over the rows or columns of a tile can be observed: one index of the pair matters."""
    return tuple(node for node in walk(keep) if isinstance(node, Load) and level_of(node) in (Level.ROW, Level.COLUMN))


def range_code(keep: Expr, placement: Placement, observed: Mapping[Expr, str] = MappingProxyType({})) -> RangeCode:
    """The range of ``keep`` over a tile; values of a launch or head become members through ``placement``."""
    named: dict[Expr, str] = {}
    lines: list[str] = []

    def spell(node: Expr) -> str:
        if node in named:
            return named[node]
        if _is_point(node):
            return f"fg::ranges::point({placement.value('bound', node, Level.HEAD)})"
        match node:
            case Symbol(name="i" | "j" as name):
                return name
            case Load():
                return observed.get(node, _ANYTHING[node.type])
            case Apply(op=op, args=args):
                return c_range(op, tuple(spell(argument) for argument in args))
        raise AssertionError(f"no range of {type(node).__name__}")

    for node in _worth_a_name(keep):
        # Spelled before it is named: the name stands for this code.
        code = spell(node)
        named[node] = f"t{len(named)}"
        lines.append(f"const auto {named[node]} = {code};")
    return RangeCode(tuple(lines), spell(keep))


def _is_point(node: Expr) -> bool:
    return level_of(node) in (Level.LAUNCH, Level.HEAD)


def _worth_a_name(keep: Expr) -> Iterator[Expr]:
    """Children first: what is used twice, and each condition that logic joins."""
    uses = Counter(child for node in walk(keep) for child in node.children)
    for node in walk(keep):
        if isinstance(node, Apply) and not _is_point(node) and node != keep:
            is_condition = node.type is ScalarType.BOOL and node.op not in ("and", "or", "not")
            if is_condition or uses[node] > 1:
                yield node
