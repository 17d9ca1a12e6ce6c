"""Stage 1c, expressions: from syntax to typed IR.

In: an expression, the names that it sees and the place where it stands. Out: its IR node with every ``let``, ``const``
and ``def`` written out, or None with the reasons reported. One mistake never hides another: what cannot be resolved
becomes None and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Protocol

from flashgen.diagnostics import Span, quoted_list
from flashgen.ir.expr import Expr, Literal, Load, Symbol, literal
from flashgen.ir.types import ScalarType
from flashgen.language import foreign, names, syntax
from flashgen.language.names import FUNCTIONS, INFIX, Bound, Frame, Macro, Meaning, Scope, Site, TensorName
from flashgen.language.nodes import Budget, ConstantError, Nodes, TooLargeError, number
from flashgen.language.report import Report, suggestion, unknown_function, wrong_count

# Levels of syntax, definitions written out: what Python's stack must hold.
_MAX_LEVELS = 160


class Names(Protocol):
    """The attention block that an expression stands in, and the names that it declares."""

    scope: Scope
    report: Report
    budget: Budget

    @property
    def declarations(self) -> Mapping[str, object]: ...
    def constant_names(self) -> tuple[str, ...]: ...
    def find(self, name: str, span: Span) -> Meaning | None:
        """What the name stands for here; reports a name that is not yet to be used."""


class Expressions:
    """Resolves the expressions of one statement."""

    def __init__(self, place: Site, block: Names) -> None:
        self.where = place
        self.frame = Frame(block.scope)
        self.block = block
        self.report = block.report
        self.nodes = Nodes(block.report, block.budget)
        self.level = 0
        self.written_out: dict[Macro, Expr | None] = {}  # definitions without parameters, each once

    def resolved(self, node: syntax.Expression, wanted: ScalarType | None = None) -> Expr | None:
        """The expression as a whole: typed, folded, within the IR's limits; an int as a float where one is wanted."""
        try:
            value = self.nodes.settled(self._resolve(node))
            return value if wanted is None else self.nodes.converted(value, wanted, node.span)
        except TooLargeError as error:
            notes = ("every 'def' is written out, and every 'let' counts as often as it is used",)
            self.report.add("E308", f"the expression {error} once it is written out", node.span, notes=notes)
            return None

    def _resolve(self, node: syntax.Expression) -> Expr | None:
        self.level += 1
        if self.level > _MAX_LEVELS:
            raise TooLargeError(f"is nested more than {_MAX_LEVELS} levels deep")
        try:
            return self._by_form(node)
        finally:
            self.level -= 1

    def _by_form(self, node: syntax.Expression) -> Expr | None:
        match node:
            case syntax.Reference():
                return self._reference(node)
            case syntax.Number():
                return self._number(node)
            case syntax.Boolean():
                return literal(node.value, self.frame.place(node.span))
            case syntax.Group():
                return self._resolve(node.inner)
            case syntax.Unary():
                op = "neg" if node.operator == "-" else "not"
                return self._apply(op, [self._resolve(node.operand)], node.span, [node.operand.span])
            case syntax.Binary():
                return self._binary(node)
            case syntax.Compare():
                return self._compare(node)
            case syntax.Conditional():
                return self._choice(node.condition, node.yes, node.no, node.span, "if … else")
            case syntax.Index():
                return self._index(node)
            case syntax.Call():
                return self._call(node)
            case syntax.Named():
                self._error("E202", f"a named argument '{node.name.text}' cannot stand here", node.span)
                return None
        raise AssertionError(f"no rule for {node}")

    def _error(
        self, code: str, message: str, span: Span, hints: tuple[str, ...] = (), notes: tuple[str, ...] = ()
    ) -> None:
        place = self.frame.place(span)
        self.report.add(code, message, place, notes=(*notes, *self.frame.notes()), hints=hints)

    def _apply(
        self, op: str, operands: list[Expr | None], span: Span, spans: list[Span], written: str = ""
    ) -> Expr | None:
        places = [self.frame.place(each) for each in spans]
        return self.nodes.operation(op, operands, self.frame.place(span), places, self.frame.notes, written)

    def _number(self, node: syntax.Number) -> Expr | None:
        try:
            return literal(number(node.text), self.frame.place(node.span))
        except ConstantError as error:
            self.nodes.constant_error(error, self.frame.place(node.span), self.frame.notes())
            return None

    # --- names

    def _reference(self, node: syntax.Reference) -> Expr | None:
        value = self._bound(node)
        if isinstance(value, TensorName):
            message = f"'{node.name}' is a tensor and stands for a value only with its indices"
            self._error("E204", message, node.span, (f"write {value.indexed(node.name)}",))
            return None
        return value

    def _bound(self, node: syntax.Reference) -> Bound:
        """What a name stands for, tensors included."""
        name, span = node.name, node.span
        if name in self.frame.parameters:
            return self.frame.parameters[name]
        if self.frame.macro is None:
            meaning = self.block.find(name, span)
            if meaning is not None:
                return meaning.value if self._admitted(name, meaning, span) else None
        if name in names.BUILTINS:
            return self._builtin(name, span)
        macro = self.frame.scope.value(name)
        if macro is not None:
            return self._expanded(macro, (), span)
        self._unknown_name(node)
        return None

    def _builtin(self, name: str, span: Span) -> Expr | None:
        value = names.builtin(name, self.frame.place(span))
        if isinstance(value, Symbol):
            objection = self.where.objection(name, value.kind)
            if objection is not None:
                self._refuse(name, *objection, span)
                return None
        return value

    def _admitted(self, name: str, meaning: Meaning, span: Span) -> bool:
        """Whether the place admits the run-time values behind a name of the block; reported where not."""
        for used, kind in meaning.uses:
            objection = self.where.objection(used, kind)
            if objection is None:
                continue
            message, fact = objection
            if used != name:
                message, fact = f"'{name}' cannot be used in {self.where.title}", f"'{name}' uses '{used}'; {fact}"
            self._refuse(used, message, fact, span)
            return False
        return True

    def _refuse(self, name: str, message: str, fact: str, span: Span) -> None:
        self._error(self.where.code, message, span, self.where.hints(name), (fact,))

    def _unknown_name(self, node: syntax.Reference) -> None:
        name, scope = node.name, self.frame.scope
        if scope.excuses(name):
            return
        if self._is_form_of_weights(name, node.span):
            return
        macro = scope.function(name)
        if macro is not None or name in FUNCTIONS:
            form = macro.head if macro is not None else f"{name}(…)"
            message = f"'{name}' is a function and stands for a value only with its arguments"
            self._error("E204", message, node.span, (f"write {form}",))
            return
        self._error("E101", f"unknown name '{name}'", node.span, self._instead_of(name))

    def _is_form_of_weights(self, name: str, span: Span) -> bool:
        if name not in names.WEIGHT_FORMS:
            return False
        self._error("E310", f"'{name}' is a form of weights and stands alone after 'weights'", span, (foreign.ROW,))
        return True

    def _instead_of(self, name: str) -> tuple[str, ...]:
        """What the writer of an unknown name may have meant."""
        scope, declared = self.frame.scope, self.block.declarations
        if self.where == names.SHAPE:
            return suggestion(name, (*self.block.constant_names(), *names.SIZES)) or (names.OWN_SIZE,)
        elsewhere = foreign.NAMES.get(name)
        if elsewhere is not None and name.lower() not in (each.lower() for each in declared):
            return (elsewhere,)
        known = (*self.frame.parameters, *declared, *names.BUILTINS, *scope.value_names(), "true", "false")
        if self.where == names.WEIGHTS:
            known = (*known, *names.WEIGHT_FORMS)
        ways = [f"tensor {name}: f32[…]"] if self.where.tensors else []
        ways += [f"param {name}: f32"] if self.where.params else []
        declare = (f"declare it: {quoted_list((*ways, f'const {name} = …'))}",)
        return suggestion(name, known) or suggestion(name, (*FUNCTIONS, *scope.function_names())) or declare

    # --- operators

    def _binary(self, node: syntax.Binary) -> Expr | None:
        left = self._resolve(node.left)
        spans = [node.left.span, node.right.span]
        if node.operator in ("and", "or") and isinstance(left, Literal) and left.value is (node.operator == "or"):
            right = self._not_taken(node.right)
            if right is None or right.type is ScalarType.BOOL:
                return left
        else:
            right = self._resolve(node.right)
        return self._apply(INFIX[node.operator], [left, right], node.span, spans)

    def _compare(self, node: syntax.Compare) -> Expr | None:
        operands = [self._resolve(operand) for operand in node.operands]
        pairs: list[Expr | None] = []
        for place, sign in enumerate(node.operators):
            spans = [node.operands[place].span, node.operands[place + 1].span]
            pairs.append(self._apply(INFIX[sign], operands[place : place + 2], spans[0].to(spans[1]), spans))
        return reduce(lambda whole, pair: self._apply("and", [whole, pair], node.span, []), pairs)

    def _choice(
        self, condition: syntax.Expression, yes: syntax.Expression, no: syntax.Expression, span: Span, written: str
    ) -> Expr | None:
        """``yes if condition else no``; of a constant condition only the branch that is taken has to have a value."""
        chosen = self._resolve(condition)
        spans = [condition.span, yes.span, no.span]
        if not isinstance(chosen, Literal) or chosen.type is not ScalarType.BOOL:
            return self._apply("where", [chosen, self._resolve(yes), self._resolve(no)], span, spans, written)
        taken = self._resolve(yes if chosen.value else no)
        other = self._not_taken(no if chosen.value else yes)
        if taken is None or other is None:
            return taken
        branches = [taken, other] if chosen.value else [other, taken]
        both = self._apply("where", [chosen, *branches], span, spans, written)
        return None if both is None else self.nodes.converted(taken, both.type, self.frame.place(span))

    def _not_taken(self, node: syntax.Expression) -> Expr | None:
        """An expression that a constant condition leaves out: checked, but it need not have a value."""
        outer, quiet = self.report, Report()
        self.report = self.nodes.report = quiet
        try:
            value = self._resolve(node)
        finally:
            self.report = self.nodes.report = outer
        for diagnostic in quiet.diagnostics:
            if diagnostic.code not in ("E205", "E206", "E207"):
                self.report.put(diagnostic)
        return value

    # --- tensors

    def _index(self, node: syntax.Index) -> Expr | None:
        indices = [self._resolve(each) for each in node.indices]
        if not isinstance(node.base, syntax.Reference):
            hints = ("all indices stand in one bracket: t[h, i]",) if isinstance(node.base, syntax.Index) else ()
            self._error("E204", "only a tensor can be indexed", node.base.span, hints)
            return None
        name = node.base.name
        if self._names_a_function_only(name, node.base.span):
            self._error("E204", f"'{name}' is a function, not a tensor", node.base.span, (f"write {name}(…)",))
            return None
        tensor = self._bound(node.base)
        if tensor is None:
            return None
        if not isinstance(tensor, TensorName):
            hint = foreign.OTHER_PAIRS if name in names.SCORES else f"write '{name}': only a 'tensor' has elements"
            self._error("E204", f"'{name}' is no tensor and cannot be indexed", node.base.span, (hint,))
            return None
        return self._load(tensor, indices, node)

    def _names_a_function_only(self, name: str, span: Span) -> bool:
        if name not in FUNCTIONS and self.frame.scope.function(name) is None:
            return False
        if name in self.frame.parameters:
            return False
        return self.frame.macro is not None or self.block.find(name, span) is None

    def _load(self, tensor: TensorName, indices: list[Expr | None], node: syntax.Index) -> Expr | None:
        if len(indices) != tensor.rank:
            wanted = f"{tensor.rank} dimension{'s' if tensor.rank > 1 else ''}"
            given = f"{len(indices)} {'index is' if len(indices) == 1 else 'indices are'} given"
            notes = (f"'{tensor.name}' is declared at line {tensor.span.line}",)
            hints = (f"write {tensor.indexed(tensor.name)}",)
            self._error("E203", f"'{tensor.name}' has {wanted}, {given}", node.span, hints, notes)
            return None
        fine: list[Expr] = []
        for value, written in zip(indices, node.indices, strict=True):
            if value is None:
                continue
            if value.type is not ScalarType.INT:
                hint = "'//' divides to an int" if _divides(written) else "write int(…)"
                message = f"an index of '{tensor.name}' must be an int, not a {value.type}"
                self._error("E201", message, written.span, (hint,))
            elif self.nodes.settled(value) is not None:
                fine.append(value)
        if len(fine) < tensor.rank:
            return None
        place = self.frame.place(node.span)
        load = Load(tensor.element.scalar, tensor=tensor.name, indices=tuple(fine), span=place)
        self.nodes.step(place)
        self.nodes.within_limits(load)
        return load

    # --- calls

    def _call(self, node: syntax.Call) -> Expr | None:
        if not isinstance(node.callee, syntax.Reference):
            self._error("E204", "only a function can be called", node.callee.span)
            return None
        name = node.callee.name
        macro = self.frame.scope.function(name)
        if macro is not None:
            return self._expanded(macro, node.arguments, node.span)
        if name in FUNCTIONS:
            return self._function(name, node)
        self._unknown_function(name, node)
        return None

    def _function(self, name: str, node: syntax.Call) -> Expr | None:
        arguments = node.arguments
        if not self._takes(name, None, arguments, node.span):
            return None
        if name == "where":
            return self._choice(arguments[0], arguments[1], arguments[2], node.span, "where")
        values = [self._resolve(argument) for argument in arguments]
        spans = [argument.span for argument in arguments]
        if name in ("min", "max"):
            whole = values[0]
            for value, span in zip(values[1:], spans[1:], strict=True):
                whole = self._apply(name, [whole, value], node.span, [spans[0], span])
            return whole
        return self._apply(FUNCTIONS[name], values, node.span, spans)

    def _takes(self, name: str, macro: Macro | None, arguments: tuple[syntax.Expression, ...], span: Span) -> bool:
        """Whether a function can be called with these arguments; reported where not."""
        by_name = [argument for argument in arguments if isinstance(argument, syntax.Named)]
        for argument in by_name:
            self._error("E202", f"'{name}' takes its arguments by their order, not by name", argument.span)
        wrong = None if by_name else wrong_count(name, macro, len(arguments))
        if wrong is not None:
            self._error("E202", wrong[0], span, wrong[1])
        return not by_name and wrong is None

    def _expanded(self, macro: Macro, arguments: tuple[syntax.Expression, ...], span: Span) -> Expr | None:
        """A definition written out over its arguments, each of which is evaluated once."""
        parameters = macro.parameters or ()
        if not self._takes(macro.name, macro, arguments, span):
            return None
        bound = {name: self._argument(each) for name, each in zip(parameters, arguments, strict=True)}
        if not macro.sound:
            return None
        if macro in self.written_out:
            return self.written_out[macro]
        self.nodes.step(self.frame.place(span))
        outer = self.frame
        self.frame = Frame(macro.scope, bound, macro, span, outer)
        try:
            value = self._resolve(macro.body)
        finally:
            self.frame = outer
        if macro.parameters is None:
            self.written_out[macro] = value
        return value

    def _argument(self, node: syntax.Expression) -> Bound:
        while isinstance(node, syntax.Group):
            node = node.inner
        return self._bound(node) if isinstance(node, syntax.Reference) else self._resolve(node)

    def _unknown_function(self, name: str, node: syntax.Call) -> None:
        scope, span = self.frame.scope, node.callee.span
        if self._is_form_of_weights(name, span):
            return
        meaning = self.block.find(name, span) if self.frame.macro is None else None
        value = self.frame.parameters.get(name, meaning.value if meaning is not None else None)
        if isinstance(value, TensorName):
            self._error("E204", f"'{name}' is a tensor, not a function", span, (f"write {value.indexed(name)}",))
        elif name in self.frame.parameters or meaning is not None or name in names.BUILTINS:
            self._error("E204", f"'{name}' is a value, not a function", span, ("a product is written with '*'",))
        elif scope.value(name):
            self._error("E202", f"'{name}' takes no arguments", node.span, (f"write '{name}' without parentheses",))
        elif not scope.excuses(name):
            forms = names.WEIGHT_FORMS if self.where == names.WEIGHTS else ()
            known = (*FUNCTIONS, *scope.function_names(), *forms)
            self._error("E102", f"unknown function '{name}'", span, unknown_function(name, known))


def _divides(node: syntax.Expression) -> bool:
    while isinstance(node, syntax.Group):
        node = node.inner
    return isinstance(node, syntax.Binary) and node.operator == "/"
