"""Stage 4b: print which pairs a tile may hold as interval arithmetic in C++.

In: the boolean that says which pairs are kept, and the names of ranges that the kernel observes while it runs. Out:
straight-line code over ranges of ``i`` and ``j``: the steps of ``analysis/kept.py``, as ``analysis/tiles.py`` evaluates
them. What does not depend on i or j is a point; an element of a captured tensor that does is in the range that was
observed over the rows or columns of the tile, and one that pairs read is looked up where a tile reads few.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flashgen.analysis.constraints import (
    COLUMN_LESS_ROW,
    ROW_LESS_COLUMN,
    Bound,
    Form,
    Limit,
    Side,
    Term,
    Truth,
    Unequal,
    block_of,
    is_point,
)
from flashgen.analysis.kept import kept_pairs
from flashgen.analysis.levels import Level
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_range
from flashgen.ir.expr import Apply, Expr, Load, Symbol
from flashgen.plan.arguments import dimension_field, stride_field, tensor_field


@dataclass(frozen=True)
class RangeCode:
    """Statements, then the expression of the result."""

    lines: tuple[str, ...]
    result: str


def range_code(keep: Expr, placement: Placement, observed: Mapping[Expr, str] = MappingProxyType({})) -> RangeCode:
    """The range of ``keep`` over a tile; values of a launch or head become members through ``placement``."""
    kept = kept_pairs(keep)
    if not kept.kept or not kept.dropped:
        return RangeCode((), f"fg::ranges::point({'true' if kept.kept else 'false'})")
    printer = _Printer(placement, observed)
    may_drop = " || ".join(printer.term(term, alone=len(kept.dropped) == 1) for term in kept.dropped)
    may_keep = " || ".join(printer.term(term, alone=len(kept.kept) == 1) for term in kept.kept)
    printer.lines += [f"const bool may_drop = {may_drop};", f"const bool may_keep = {may_keep};"]
    return RangeCode(_read_ones(printer.lines), "{may_drop, may_keep}")


def _read_ones(lines: list[str]) -> tuple[str, ...]:
    """Without the values that nothing reads."""
    kept: list[str] = []
    for line in reversed(lines):
        declared = line.removeprefix("const ").split()[1]
        if declared.startswith("may_") or any(re.search(rf"\b{declared}\b", later) for later in kept):
            kept.append(line)
    return tuple(reversed(kept))


@dataclass(frozen=True)
class _Box:
    """The names of what is left of a tile: the ranges of i and j, and of i - j where that is known better."""

    i: str = "i"
    j: str = "j"
    distance: str | None = None

    def of(self, position: Symbol) -> str:
        """The name of the range of i or j."""
        return self.i if position.name == "i" else self.j

    def with_position(self, position: Symbol, name: str) -> _Box:
        """The box with another range of i or j."""
        return replace(self, i=name) if position.name == "i" else replace(self, j=name)


class _Printer:
    """Prints terms; equal ranges over equal boxes are computed once."""

    def __init__(self, placement: Placement, observed: Mapping[Expr, str]) -> None:
        self.lines: list[str] = []
        self._placement = placement
        self._observed = observed
        self._names: dict[str, str] = {}  # of a range, by its code

    def term(self, term: Term, *, alone: bool) -> str:
        """Whether a pair of the tile may satisfy the term."""
        box = _Box()
        checks: list[str] = []
        for number, bound in enumerate(term.bounds):
            box = self._bound(bound, box, checks, is_needed=term.tightens(number))
        checks += [self._unequal(each, box) for each in term.unequal]
        checks += [self._truth(each, box) for each in term.truths]
        code = " && ".join(checks) or "true"
        return code if alone or len(checks) == 1 else f"({code})"

    # -- bounds ------------------------------------------------------------------------------------------------

    def _bound(self, bound: Bound, box: _Box, checks: list[str], *, is_needed: bool) -> _Box:
        """Adds the check; the box that the bound leaves where later checks need it."""
        measured = self._measure(bound.form, box)
        least, most = [self._limit(each, "-") for each in bound.least], [self._limit(each, "") for each in bound.most]
        if not is_needed and (
            len(least) + len(most) == 1 or all(each.is_number for each in (*bound.least, *bound.most))
        ):
            checks += [*(f"{measured}.hi >= {each}" for each in least), *(f"{measured}.lo <= {each}" for each in most)]
            return box
        code = measured
        for limit in least:
            code = f"fg::ranges::at_least({code}, {limit})"
        for limit in most:
            code = f"fg::ranges::at_most({code}, {limit})"
        if not is_needed:
            checks.append(f"fg::ranges::some({code})")
            return box
        left = self._named(code)
        checks.append(f"fg::ranges::some({left})")
        return self._restricted(bound.form, left, box, checks)

    def _restricted(self, form: Form, left: str, box: _Box, checks: list[str]) -> _Box:
        """What the range of a form leaves of i and j, each atom what the others leave to it."""
        if form.axis is not None:
            return box.with_position(form.axis, left)
        if form.is_distance:
            box = replace(box, distance=left)
        for number, (atom, c) in enumerate(form.terms):
            inner = block_of(atom)
            if inner is None or abs(c) != 1:
                continue
            code = left
            for other, (each, k) in enumerate(form.terms):
                if other != number:
                    code = _added(code, self._range(each, box), -k)
            position, block = inner
            code = code if c > 0 else f"fg::ranges::scaled({code}, -1)"
            code = code if block == 1 else f"fg::ranges::of_blocks({code}, {block})"
            name = self._named(f"fg::ranges::meet({box.of(position)}, {code})")
            if not form.is_distance:  # there is a pair at any distance that is left
                checks.append(f"fg::ranges::some({name})")
            box = box.with_position(position, name)
        return box

    def _unequal(self, unequal: Unequal, box: _Box) -> str:
        measured, limit = self._measure(unequal.form, box), self._offset(unequal.limit)
        code = f"!fg::ranges::is_point({measured}, {limit})"
        sides = self._sides(unequal.limit.sides)
        return f"(!{sides} || {code})" if sides else code

    def _measure(self, form: Form, box: _Box) -> str:
        """The range of a form, over the integers."""
        if form.axis is not None:
            return box.of(form.axis)
        if form.is_distance and box.distance is not None:
            return box.distance
        (first, c), *rest = form.terms
        code = self._range(first, box)
        code = code if c == 1 else f"fg::ranges::scaled({code}, {c})"
        for atom, k in rest:
            code = _added(code, self._range(atom, box), k)
        return code if form.terms == ((first, 1),) else self._named(code)

    def _limit(self, limit: Limit, open_end: str) -> str:
        sides = self._sides(limit.sides)
        code = self._offset(limit)
        return f"({sides} ? {code} : {open_end}fg::ranges::far)" if sides else code

    def _sides(self, sides: tuple[Side, ...]) -> str:
        """Whether no side of a comparison leaves 32 bits over the whole tile; empty where none can."""
        found = []
        for side in sides:
            code = self._measure(side.form, _Box()) if side.form.terms else "fg::ranges::point(0)"
            found.append(f"fg::ranges::fits(fg::ranges::shifted({code}, {self._offset(side.offset)}))")
        return self._named(" && ".join(found), "bool") if found else ""

    def _offset(self, limit: Limit) -> str:
        """constant + Σ coefficient · point, in 64 bits."""
        values = [(self._point(point), c) for point, c in limit.points]
        if not values:
            return str(limit.constant)
        if limit.constant == 0 and values[0][1] == 1 and len(values) == 1:
            return values[0][0]
        code = ""
        for value, c in values:
            sign = (" - " if c < 0 else " + ") if code else "-" if c < 0 else ""
            code += f"{sign}{'' if abs(c) == 1 else f'{abs(c)} * '}int64_t({value})"
        return code if limit.constant == 0 else f"{code} {'-' if limit.constant < 0 else '+'} {abs(limit.constant)}"

    # -- ranges of expressions ---------------------------------------------------------------------------------

    def _truth(self, truth: Truth, box: _Box) -> str:
        if is_point(truth.condition):
            value = self._point(truth.condition)
            return value if truth.value else f"!{value}"
        return f"{self._range(truth.condition, box)}.{'may_be_true' if truth.value else 'may_be_false'}"

    def _range(self, node: Expr, box: _Box) -> str:
        """The range of an expression over what is left of the tile."""
        if is_point(node):
            return f"fg::ranges::point({self._point(node)})"
        if box.distance is not None and node in (ROW_LESS_COLUMN, COLUMN_LESS_ROW):
            return box.distance if node == ROW_LESS_COLUMN else f"fg::ranges::scaled({box.distance}, -1)"
        match node:
            case Symbol():
                return box.of(node)
            case Load():
                return self._observed.get(node) or self._named(self._elements(node))
            case Apply(op=op, args=args):
                return self._named(c_range(op, tuple(self._range(argument, box) for argument in args)))
        raise AssertionError(f"no range of {type(node).__name__}")

    def _elements(self, load: Load) -> str:
        """The range of the elements that the pairs of the whole tile read."""
        begin, end, offset = "", "", []
        for axis, each in enumerate(load.indices):
            dimension = f"a.{dimension_field(load.tensor, axis)}"
            if is_point(each):
                position = f"fg::clamp_index({self._point(each)}, {dimension})"
            else:
                position = f"n{axis}"
                begin += (
                    f"fg::ranges::over({self._range(each, _Box())}, {dimension}, [&](int64_t {position}) {{ return "
                )
                end += "; })"
            offset.append(f"int64_t({position}) * a.{stride_field(load.tensor, axis)}")
        element = f"fg::element(a.{tensor_field(load.tensor)}, {' + '.join(offset)})"
        return f"{begin}fg::ranges::point({element}){end}"

    def _point(self, node: Expr) -> str:
        return self._placement.value("bound", node, Level.HEAD)

    def _named(self, code: str, c_type: str = "auto") -> str:
        """A name for this code, the same one wherever the code is the same."""
        if code not in self._names:
            self._names[code] = f"t{len(self._names)}"
            self.lines.append(f"const {c_type} {self._names[code]} = {code};")
        return self._names[code]


def _added(code: str, other: str, factor: int) -> str:
    """code + factor · other."""
    other = other if abs(factor) == 1 else f"fg::ranges::scaled({other}, {abs(factor)})"
    return f"fg::ranges::{'sum' if factor > 0 else 'difference'}({code}, {other})"
