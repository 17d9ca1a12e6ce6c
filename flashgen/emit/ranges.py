"""Stage 4b: print the range program of a mask as C++.

In: the boolean that says which pairs are kept, and the names of ranges that the kernel observes while it runs. Out:
straight-line code over ranges of ``i`` and ``j``: the steps of the mask's ``RangeProgram``. What does not depend on i
or j is a point; an element of a captured tensor that does is in the range that was observed over the rows or columns
of the tile, and one that pairs read is looked up where a tile reads few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.analysis.levels import Level
from flashgen.analysis.range_program import (
    Alternative,
    Check,
    Clipped,
    Differs,
    Elements,
    End,
    Fits,
    Left,
    MayBe,
    Offset,
    Point,
    Position,
    RangeProgram,
    Register,
    Rule,
    Some,
    Step,
    Sum,
    asks,
    range_program,
    reads,
)
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_range, c_sum
from flashgen.ir.expr import Expr
from flashgen.plan.arguments import dimension_field, stride_field, tensor_field


@dataclass(frozen=True)
class RangeCode:
    """Statements, then the expression of the result."""

    lines: tuple[str, ...]
    result: str


def range_code(keep: Expr, placement: Placement, observed: Mapping[Expr, str] = MappingProxyType({})) -> RangeCode:
    """The range of ``keep`` over a tile; values of a launch or head become members through ``placement``."""
    program = range_program(keep)
    if not program.kept or not program.dropped:
        return RangeCode((), f"fg::ranges::point({'true' if program.kept else 'false'})")
    printer = _Printer(program, placement, observed)
    lines = [
        *printer.lines,
        f"const bool may_drop = {printer.any_of(program.dropped)};",
        f"const bool may_keep = {printer.any_of(program.kept)};",
    ]
    return RangeCode(tuple(lines), "{may_drop, may_keep}")


class _Printer:
    """Prints steps: a name for each that is computed, code for those that are a name, a number or read in one place."""

    def __init__(self, program: RangeProgram, placement: Placement, observed: Mapping[Expr, str]) -> None:
        self.lines: list[str] = []
        self._program = program
        self._placement = placement
        self._observed = observed
        self._read = self._reads()
        self._left_of = {register for step in program.steps for register in reads(step)}  # not by checks alone
        self._code: list[str] = []  # of each step, where it is read; of a point its value
        for number, step in enumerate(program.steps):
            self._code.append(self._step(number, step) if self._read[number] else "")

    def _reads(self) -> Counter[Register]:
        """How often a step is read, and a clipped range asked about; what the kernel observes needs no indices."""
        found: Counter[Register] = Counter()
        for checks in {*self._program.kept, *self._program.dropped}:
            found.update(register for check in checks for register in asks(check))
        for number, step in reversed([*enumerate(self._program.steps)]):
            if found[number] and not (isinstance(step, Elements) and step.load in self._observed):
                found.update(reads(step))
        return found

    # -- checks ------------------------------------------------------------------------------------------------

    def any_of(self, alternatives: tuple[Alternative, ...]) -> str:
        """Whether the tile may hold a pair that satisfies one."""
        return " || ".join(self._all_of(checks, alone=len(alternatives) == 1) for checks in alternatives)

    def _all_of(self, checks: Alternative, *, alone: bool) -> str:
        printed = [code for check in checks for code in self._check(check)]
        code = " && ".join(printed) or "true"
        return code if alone or len(printed) == 1 else f"({code})"

    def _check(self, check: Check) -> tuple[str, ...]:
        match check:
            case Some(of=of):
                step = self._program.steps[of]
                if isinstance(step, Clipped) and not self._code[of]:
                    return self._some(step)
                return (f"fg::ranges::some({self._code[of]})",)
            case Differs(of=of, end=end):
                code = f"!fg::ranges::is_point({self._code[of]}, {self._code[end.offset]})"
                return (code if end.fits is None else f"(!{self._code[end.fits]} || {code})",)
            case MayBe(condition=condition, value=value):
                if isinstance(self._program.steps[condition], Point):
                    return (self._code[condition] if value else f"!{self._code[condition]}",)
                return (f"{self._code[condition]}.{'may_be_true' if value else 'may_be_false'}",)

    def _some(self, step: Clipped) -> tuple[str, ...]:
        """Whether a range reaches its ends; of several, whether they leave something."""
        if not self._is_compared(step):
            return (f"fg::ranges::some({self._clipped(step)})",)
        measured = self._code[step.of]
        least = (f"{measured}.hi >= {self._end(end, '-')}" for end in step.least)
        most = (f"{measured}.lo <= {self._end(end, '')}" for end in step.most)
        return (*least, *most)

    def _is_compared(self, step: Clipped) -> bool:
        """Whether that takes a comparison for each end: of one, or of numbers."""
        ends = (*step.least, *step.most)
        return len(ends) == 1 or all(self._is_number(end) for end in ends)

    def _is_number(self, end: End) -> bool:
        offset = self._program.steps[end.offset]
        assert isinstance(offset, Offset)
        return end.fits is None and not offset.points

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self, number: Register, step: Step) -> str:
        """The code of a step, where it is read."""
        match step:
            case Position(symbol=symbol):
                return symbol.name
            case Point(expr=expr):
                return self._placement.value("bound", expr, Level.HEAD)
            case Elements():
                return self._observed.get(step.load) or self._named(self._elements(step))
            case Rule(op=op, args=args):
                return self._named(c_range(op, tuple(self._range(each) for each in args)))
            case Sum():
                return self._named(self._sum(step.terms))
            case Offset():
                return self._offset(step)
            case Fits():
                return self._named(self._fits(step), "bool")
            case Clipped():
                is_left = number in self._left_of or (self._read[number] > 1 and not self._is_compared(step))
                return self._named(self._clipped(step)) if is_left else ""
            case Left():
                return self._named(self._left(step))

    def _range(self, register: Register) -> str:
        """A step as a range."""
        code = self._code[register]
        return f"fg::ranges::point({code})" if isinstance(self._program.steps[register], Point) else code

    def _sum(self, terms: tuple[tuple[Register, int], ...]) -> str:
        (first, factor), *rest = terms
        code = self._range(first) if factor == 1 else f"fg::ranges::scaled({self._range(first)}, {factor})"
        for register, coefficient in rest:
            code = _added(code, self._range(register), coefficient)
        return code

    def _clipped(self, step: Clipped) -> str:
        code = self._code[step.of]
        for end in step.least:
            code = f"fg::ranges::at_least({code}, {self._end(end, '-')})"
        for end in step.most:
            code = f"fg::ranges::at_most({code}, {self._end(end, '')})"
        return code

    def _end(self, end: End, open_end: str) -> str:
        code = self._code[end.offset]
        return code if end.fits is None else f"({self._code[end.fits]} ? {code} : {open_end}fg::ranges::far)"

    def _left(self, step: Left) -> str:
        code = self._sum(((step.form, 1), *((other, -k) for other, k in step.others)))
        code = code if step.sign > 0 else f"fg::ranges::scaled({code}, -1)"
        code = code if step.block is None else f"fg::ranges::of_blocks({code}, {self._code[step.block]})"
        return f"fg::ranges::meet({self._code[step.position]}, {code})"

    def _fits(self, step: Fits) -> str:
        """Whether no side of a comparison leaves 32 bits over the whole tile."""
        sides = (("fg::ranges::point(0)" if form is None else self._range(form), offset) for form, offset in step.sides)
        return " && ".join(f"fg::ranges::fits(fg::ranges::shifted({code}, {self._code[n]}))" for code, n in sides)

    def _offset(self, step: Offset) -> str:
        """constant + Σ coefficient · point, in 64 bits."""
        values = [(self._code[point], c) for point, c in step.points]
        if step.constant == 0 and len(values) == 1 and values[0][1] == 1:
            return values[0][0]
        return c_sum(step.constant, ((f"int64_t({value})", c) for value, c in values))

    def _elements(self, step: Elements) -> str:
        """The range of the elements that the pairs of the whole tile read."""
        load, begin, end, offset = step.load, "", "", []
        for axis, register in enumerate(step.indices):
            dimension = f"a.{dimension_field(load.tensor, axis)}"
            if isinstance(self._program.steps[register], Point):
                position = f"fg::clamp_index({self._code[register]}, {dimension})"
            else:
                position = f"n{axis}"
                begin += f"fg::ranges::over({self._code[register]}, {dimension}, [&](int64_t {position}) {{ return "
                end += "; })"
            offset.append(f"int64_t({position}) * a.{stride_field(load.tensor, axis)}")
        element = f"fg::element(a.{tensor_field(load.tensor)}, {' + '.join(offset)})"
        return f"{begin}fg::ranges::point({element}){end}"

    def _named(self, code: str, c_type: str = "auto") -> str:
        """A name for the code of a step."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {c_type} {name} = {code};")
        return name


def _added(code: str, other: str, factor: int) -> str:
    """code + factor · other."""
    other = other if abs(factor) == 1 else f"fg::ranges::scaled({other}, {abs(factor)})"
    return f"fg::ranges::{'sum' if factor > 0 else 'difference'}({code}, {other})"
