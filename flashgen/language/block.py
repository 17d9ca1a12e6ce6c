"""Stage 1d, names of a block: what an ``attention`` block declares, and what each name stands for at each statement.

``const``, ``param`` and ``tensor`` are known in the whole block, a ``let`` from the next statement on.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flashgen.diagnostics import Span
from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, literal
from flashgen.ir.spec import MAX_CAPTURED, OP_ARGUMENTS
from flashgen.ir.types import ElementType, ScalarType
from flashgen.language import names, syntax
from flashgen.language.expressions import Expressions
from flashgen.language.imports import expressions_below
from flashgen.language.names import Meaning, Scope, TensorName, run_time_values
from flashgen.language.nodes import Budget, Value, fits
from flashgen.language.report import Report

PARAM_TYPES: Mapping[str, ScalarType] = {"f32": ScalarType.FLOAT, "i32": ScalarType.INT}
# Of captured tensors.
ELEMENT_TYPES: Mapping[str, ElementType] = {
    element.value: element for element in ElementType if element is not ElementType.F8E4M3
}

Declaring = syntax.Const | syntax.Param | syntax.Tensor | syntax.Let
_DECLARING = (syntax.Const, syntax.Param, syntax.Tensor, syntax.Let)


@dataclass(frozen=True)
class Declaration:
    """A declared name; ``statement`` is None where its statement did not parse."""

    name: str
    span: Span
    position: int
    statement: Declaring | None


class Block:
    """The names of one block. ``position`` is the statement being resolved."""

    def __init__(
        self, tree: syntax.Attention, scope: Scope, overrides: Mapping[str, Value], report: Report, budget: Budget
    ) -> None:
        self.budget = budget
        self.tree = tree
        self.scope = scope
        self.overrides = overrides
        self.report = report
        self.position = 0
        self.used: set[str] = set()
        self.declarations: dict[str, Declaration] = {}
        self._values: dict[str, Expr | None] = {}
        self._busy: set[str] = set()
        self._uses: dict[str, tuple[tuple[str, SymbolKind | None], ...]] = {}
        for position, statement in enumerate(tree.statements):
            if isinstance(statement, _DECLARING):
                self._declare(statement.name, position, statement)
            elif isinstance(statement, syntax.Broken) and statement.name is not None:
                self._declare(statement.name, position, None)

    # --- declaring

    def _declare(self, name: syntax.Name, position: int, statement: Declaring | None) -> None:
        declaration = Declaration(name.text, name.span, position, statement)
        first = self.declarations.get(name.text)
        if first is not None:
            notes = (f"'{name.text}' is first defined at line {first.span.line}",)
            self.report.add("E104", f"'{name.text}' is defined twice", name.span, notes=notes)
            return
        self.declarations[name.text] = declaration
        if isinstance(statement, syntax.Param | syntax.Tensor):
            self._count(name)
        if statement is not None:
            self._check_name(name, statement)

    def _count(self, name: syntax.Name) -> None:
        given = sum(isinstance(each.statement, syntax.Param | syntax.Tensor) for each in self.declarations.values())
        if given == MAX_CAPTURED + 1:
            message = f"'{name.text}' is one more than the {MAX_CAPTURED} tensors and params that an op can take"
            hints = ("put values of one type into one tensor, f32[40] say, and read t[0], t[1], …",)
            self.report.add("E313", message, name.span, hints=hints)

    def _check_name(self, name: syntax.Name, statement: Declaring) -> None:
        text = name.text
        macro = self.scope.value(text)
        if text in names.BUILTINS or text in names.WEIGHT_FORMS:
            message = f"'{text}' is a built-in name and cannot be defined again"
            self.report.add("E105", message, name.span, hints=(f"choose another name, for example '{text}_'",))
        elif macro is not None and macro.standard:
            message = f"'{text}' is a name of the prelude and cannot be redefined"
            self.report.add("E105", message, name.span, notes=(f"in the prelude '{text}' is '{macro.text}'",))
        elif macro is not None:
            notes = (f"'{text}' is defined at {macro.span}",)
            self.report.add("E104", f"'{text}' is already defined by a 'def'", name.span, notes=notes)
        elif isinstance(statement, syntax.Param | syntax.Tensor):
            if text in OP_ARGUMENTS:
                message = f"'{text}' is an argument of every op and cannot name a {statement.keyword}"
                self.report.add("E111", message, name.span, hints=(f"choose another name, for example '{text}_'",))
            elif keyword.iskeyword(text) or text == "__debug__":
                message = f"'{text}' is a word of Python, so that the op could not take it by name"
                self.report.add("E111", message, name.span, hints=(f"choose another name, for example '{text}_'",))

    # --- what names stand for

    def constant_names(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.declarations.items() if isinstance(each.statement, syntax.Const))

    def find(self, name: str, span: Span) -> Meaning | None:
        """What the name stands for at the current statement; None where the block does not declare it."""
        declaration = self.declarations.get(name)
        if declaration is None:
            return None
        self.used.add(name)
        match declaration.statement:
            case syntax.Const():
                return Meaning(_at(self.constant(declaration, span), span))
            case syntax.Param() as param:
                return self._param(declaration, param, span)
            case syntax.Tensor() as tensor:
                element = ELEMENT_TYPES.get(tensor.element.text)
                if element is None or not tensor.shape:
                    return Meaning(None)
                sizes = (each.name if isinstance(each, syntax.Reference) else "" for each in tensor.shape)
                usual = tuple(names.INDEX_OF.get(each, "…") for each in sizes)
                captured = TensorName(name, element, usual, declaration.span)
                return Meaning(captured, ((name, None),))
            case syntax.Let():
                return self._let(declaration, span)
            case None:
                return Meaning(None)

    def _param(self, declaration: Declaration, param: syntax.Param, span: Span) -> Meaning:
        scalar = PARAM_TYPES.get(param.type.text)
        if scalar is None:
            return Meaning(None)
        current = self.tree.statements[self.position]
        if isinstance(current, syntax.Param) and declaration.position >= self.position:
            self._too_early(declaration, span)
            return Meaning(None)
        symbol = Symbol(scalar, name=declaration.name, kind=SymbolKind.PARAM, span=span)
        return Meaning(symbol, ((declaration.name, SymbolKind.PARAM),))

    def _let(self, declaration: Declaration, span: Span) -> Meaning:
        if declaration.position >= self.position:
            self._too_early(declaration, span)
            return Meaning(None)
        value = self._values.get(declaration.name)
        return Meaning(_at(value, span), self._uses.get(declaration.name, ()))

    def _too_early(self, declaration: Declaration, span: Span) -> None:
        name = declaration.name
        if declaration.position == self.position:
            self.report.add("E107", f"'{name}' is used in its own definition", span)
            return
        notes = (f"'{name}' is defined at line {declaration.span.line}",)
        hints = (f"move the definition of '{name}' up",)
        self.report.add("E107", f"'{name}' is used before its definition", span, notes=notes, hints=hints)

    # --- values

    def define_let(self, statement: syntax.Let) -> None:
        """Work out a ``let``, so that later statements see it."""
        value = Expressions(names.LET, self).resolved(statement.value)
        declaration = self.declarations[statement.name.text]
        if declaration.statement is statement:
            self._values[declaration.name] = value
            self._uses[declaration.name] = () if value is None else run_time_values(value)

    def constant(self, declaration: Declaration, span: Span) -> Expr | None:
        """The value of a ``const``, worked out when first asked for."""
        if declaration.name in self._values:
            return self._values[declaration.name]
        if declaration.name in self._busy:
            self.report.add("E307", f"the constant '{declaration.name}' is defined by itself", span)
            return None
        for needed in self._constants_below(declaration):
            self._define_constant(needed)
        return self._values[declaration.name]

    def _constants_below(self, root: Declaration) -> list[Declaration]:
        """The constants without a value that one needs, each after those that it needs itself; the one last."""
        order: list[Declaration] = []
        seen = {root.name}
        path = [(root, self._constants_used(root))]
        while path:
            declaration, used = path[-1]
            following = next((each for each in used if each.name not in seen), None)
            if following is None:
                order.append(declaration)
                path.pop()
            else:
                seen.add(following.name)
                path.append((following, self._constants_used(following)))
        return order

    def _constants_used(self, declaration: Declaration) -> Iterator[Declaration]:
        assert isinstance(declaration.statement, syntax.Const)
        for node in expressions_below(declaration.statement.value):
            if isinstance(node, syntax.Reference) and node.name not in self._values and node.name not in self._busy:
                used = self.declarations.get(node.name)
                if used is not None and isinstance(used.statement, syntax.Const):
                    yield used

    def _define_constant(self, declaration: Declaration) -> None:
        name, statement = declaration.name, declaration.statement
        if name in self._values or not isinstance(statement, syntax.Const):
            return
        self._busy.add(name)
        outer, self.position = self.position, declaration.position
        place = names.compile_time("a constant", "name a value that is known only at run time with 'let'")
        value = Expressions(place, self).resolved(statement.value)
        self.position = outer
        self._busy.discard(name)
        if name in self.overrides:
            value = self._overridden(statement, value, self.overrides[name])
        self._values[name] = value

    def _overridden(self, statement: syntax.Const, value: Expr | None, given: Value) -> Expr | None:
        """The constant with the value that the caller gives instead."""
        name, span = statement.name.text, statement.name.span
        wanted = value.type if value is not None else None
        shown = repr(given).lower() if isinstance(given, bool) else repr(given)
        kind = {bool: ScalarType.BOOL, int: ScalarType.INT, float: ScalarType.FLOAT}.get(type(given))
        if wanted is ScalarType.FLOAT and kind is ScalarType.INT:
            given, kind = float(given), ScalarType.FLOAT
        if kind is None or (wanted is not None and kind is not wanted):
            of, given_is = ("no bool, int or float" if each is None else each.noun for each in (wanted, kind))
            message = f"the constant '{name}' is {of}, the value {shown} given for it is {given_is}"
            self.report.add("E212", message, span)
            return None
        if isinstance(given, float) and math.isnan(given):
            self.report.add("E212", f"the value given for the constant '{name}' is not a number", span)
            return None
        error = fits(given)
        if error is not None:
            self.report.add(error.code, f"the value given for '{name}': {error.message}", span)
            return None
        return literal(given, span)

    def constants(self) -> Iterable[tuple[str, Value]]:
        """The constants in force, in the order of declaration."""
        for declaration in self.declarations.values():
            if isinstance(declaration.statement, syntax.Const):
                value = self.constant(declaration, declaration.span)
                if isinstance(value, Literal):
                    yield declaration.name, value.value


def _at(value: Expr | None, span: Span) -> Expr | None:
    """A constant at the place where it is used; anything else stays the one object that it is."""
    return replace(value, span=span) if isinstance(value, Literal) else value
