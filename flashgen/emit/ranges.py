"""Stage 4b: print the kept pairs of a tile as interval arithmetic in C++.

In: the boolean that says which pairs are kept. Out: straight-line code over ranges of ``i`` and ``j``. What does not
depend on i or j is a point; an element of a captured tensor that does may be anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flashgen.analysis.levels import Level, level_of
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_range
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, walk
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


def range_code(keep: Expr, placement: Placement) -> RangeCode:
    """The range of ``keep`` over a tile; values of a launch or head become members through ``placement``."""
    uses = Counter(child for node in walk(keep) for child in node.children)
    named: dict[Expr, str] = {}
    lines: list[str] = []

    def spell(node: Expr) -> str:
        if node in named:
            return named[node]
        if level_of(node) in (Level.LAUNCH, Level.HEAD):
            return f"fg::ranges::point({placement.value('bound', node, Level.HEAD)})"
        match node:
            case Symbol(name="i" | "j" as name):
                return name
            case Load():
                return _ANYTHING[node.type]
            case Apply(op=op, args=args):
                return c_range(op, tuple(spell(argument) for argument in args))
        raise AssertionError(f"no range of {node}")

    def visit(node: Expr) -> None:
        """Names, children first, for what is used twice and for the operands of a long conjunction."""
        if node in named or level_of(node) in (Level.LAUNCH, Level.HEAD):
            return
        if isinstance(node, Apply):
            for argument in node.args:
                visit(argument)
            if uses[node] > 1 or (node.op not in ("and", "or", "not") and node.type is ScalarType.BOOL and node != keep):
                code = spell(node)
                named[node] = f"t{len(named)}"
                lines.append(f"const auto {named[node]} = {code};")

    if not isinstance(keep, Literal):
        visit(keep)
    return RangeCode(tuple(lines), spell(keep))
