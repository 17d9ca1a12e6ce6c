"""Expressions and specs back to the language's own text: for comments, messages, and specs that were traced.

In: an expression. Out: text that parses to the same expression (``let``s and ``def``s stay expanded). Or in: an
``AttentionSpec``. Out: its statements, and text that parses to an equal one. Parts that occur twice become a ``let``;
constants, which are worked out in a spec, are not declared again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flashgen.diagnostics.diagnostic import Source, Span
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, literal, score_input, substitute, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.operators_base import Strength
from flashgen.ir.spec import DEFAULT_SCALE, AttentionSpec, CapturedTensor, Param, Schedule, Statement
from flashgen.ir.types import ElementType, ScalarType


def text(expr: Expr) -> str:
    """The expression as a user would write it."""
    return _text(expr)[0]


def _text(expr: Expr) -> tuple[str, int]:
    match expr:
        case Literal(value=bool() as value):
            return ("true" if value else "false"), Strength.CALL
        case Literal(value=value):
            shown = repr(value)
            return shown, Strength.UNARY if shown.startswith("-") else Strength.CALL
        case Symbol(name=name):
            return name, Strength.CALL
        case Load(tensor=tensor, indices=indices):
            return f"{tensor}[{', '.join(text(index) for index in indices)}]", Strength.CALL
        case Apply(op="to_float" | "to_int" as op, args=(argument,)):
            return f"{OPERATORS[op].spelling}({text(argument)})", Strength.CALL
        case Apply(op="where", args=(condition, yes, no)):
            shown = f"{_within(yes, Strength.OR)} if {_within(condition, Strength.OR)}"
            return f"{shown} else {_within(no, Strength.CONDITIONAL)}", Strength.CONDITIONAL
        case Apply(op=op, args=args):
            return _operation(op, args)
    raise AssertionError(f"no text for {type(expr).__name__}")


def _operation(op: str, args: tuple[Expr, ...]) -> tuple[str, int]:
    """A sign or word between or before its operands, or a call."""
    row = OPERATORS[op]
    sign, strength = row.spelling, row.strength
    if strength is Strength.CALL:
        return f"{op}({', '.join(text(argument) for argument in _without_conversions(op, args))})", strength
    if row.arity == 1:
        return f"{sign}{' ' if sign.isalpha() else ''}{_within(args[0], strength)}", strength
    left, right = _without_conversions(op, args)
    # ** groups to the right and comparisons do not chain; everything else groups to the left.
    left_strength = strength + (1 if strength in (Strength.POWER, Strength.COMPARISON) else 0)
    right_strength = strength + (0 if strength is Strength.POWER else 1)
    return f"{_within(left, left_strength)} {sign} {_within(right, right_strength)}", strength


def _without_conversions(op: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The arguments without the conversions that typing the operator puts back: int among floats promotes."""

    def bare(argument: Expr) -> Expr:
        converted = (
            isinstance(argument, Apply) and argument.op == "to_float" and argument.args[0].type is ScalarType.INT
        )
        return argument.children[0] if converted else argument

    types = tuple(argument.type for argument in args)
    found = list(args)
    for position, argument in enumerate(args):
        without = [*found[:position], bare(argument), *found[position + 1 :]]
        if OPERATORS[op].signature(tuple(each.type for each in without)).arguments == types:
            found = without
    return tuple(found)


def _within(expr: Expr, strength: int) -> str:
    shown, own = _text(expr)
    return shown if own >= strength else f"({shown})"


_WORTH_A_NAME = 6  # parts that an expression has at least


def spec_text(spec: AttentionSpec) -> str:
    """The ``attention`` block of a spec."""
    lines = (f"    {keyword} {rest}" for keyword, rest in _statements(spec))
    return "\n".join((f"attention {spec.name} {{", *lines, "}", ""))


def with_text(spec: AttentionSpec, file: str) -> AttentionSpec:
    """The same spec with the text that it means, which diagnostics and generated files show."""
    written = []
    for number, (keyword, rest) in enumerate(_statements(spec), start=2):
        line = f"{keyword} {rest}"
        written.append(Statement(keyword, line, Span(file, number, 5, number, 5 + len(line))))
    return replace(spec, statements=tuple(written), sources=(Source(file, spec_text(spec)),))


def _statements(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Every statement: its word, and what follows."""
    found = [("head_dim", ", ".join(map(str, spec.head_dims)))]
    if spec.dtypes is not None:
        types = (*spec.dtypes, ElementType.F8E4M3) if spec.takes_f8 else spec.dtypes
        found.append(("dtype", ", ".join(map(str, types))))
    found += [("param", declared(each)) for each in spec.params]
    found += [("tensor", declared(each)) for each in spec.tensors]
    if spec.scale != DEFAULT_SCALE:
        found.append(("scale", text(spec.scale)))
    taken = {*(each.name for each in spec.params), *(each.name for each in spec.tensors)}
    sections = _sections(spec)
    named = _names(list(sections.values()), taken)
    found += [("let", f"{symbol.name} = {text(_cut(expr, named))}") for expr, symbol in named.items()]
    for keyword, expr in sections.items():
        form = spec.weights.form.written[-1] if keyword == "weights" else "{}"
        block = f"block {spec.layout.block}: " if keyword == "layout" and spec.layout is not None else ""
        found.append((keyword, block + form.format(text(_shortened(expr, named)))))
    if spec.select is not None:
        indices = [text(_shortened(each, named)) for each in spec.select.indices]
        found.append(("select", f"{spec.select.block}: {spec.select.tensor}[{', '.join((*indices, ':'))}]"))
    if spec.dropout is not None:
        found.append(("dropout", text(spec.dropout)))
    if spec.schedule != Schedule():
        pins = " ".join(f"{name} = {value}" for name, value in spec.schedule.pins.items())
        found.append(("schedule", f"{{ {pins} }}"))
    return found


def _sections(spec: AttentionSpec) -> dict[str, Expr]:
    """The expressions that may name parts, by their statements; those that say nothing are left out."""
    found: dict[str, Expr] = {}
    if spec.score != score_input("s"):
        found["score"] = spec.score
    if spec.mask != literal(True):
        found["mask"] = spec.mask
    if spec.layout is not None:
        found["layout"] = spec.layout.keep
    if spec.weights.expression is not None:
        found["weights"] = spec.weights.expression
    return found


def declared(each: CapturedTensor | Param) -> str:
    """What a spec says of a captured tensor or param, without the word before it: ``slope: f32[H] grad``."""
    grad = " grad" if each.grad else ""
    if isinstance(each, CapturedTensor):
        return f"{each.name}: {each.element}[{', '.join(text(extent) for extent in each.shape)}]{grad}"
    default = "" if each.default is None else f" = {text(each.default)}"
    return f"{each.name}: {'i32' if each.type is ScalarType.INT else 'f32'}{default}{grad}"


def _names(roots: list[Expr], taken: set[str]) -> dict[Expr, Symbol]:
    """What occurs more than once and is worth it, children first, with the name that it gets."""
    uses: Counter[Expr] = Counter(roots)
    for node in walk(*roots):
        uses.update(node.children)
    free = (name for number in range(1, 1 << 30) if (name := f"x{number}") not in taken)
    return {
        node: Symbol(node.type, name=next(free), kind=SymbolKind.PARAM)
        for node in walk(*roots)
        if isinstance(node, Apply) and uses[node] > 1 and node.size >= _WORTH_A_NAME
    }


def _cut(expr: Expr, named: dict[Expr, Symbol]) -> Expr:
    """A named expression over the names of its own parts."""
    return expr.with_children(tuple(_shortened(child, named) for child in expr.children))


def _shortened(expr: Expr, named: dict[Expr, Symbol]) -> Expr:
    values: dict[Expr, Expr] = {}
    for node, symbol in named.items():  # children first: a parent is looked for as it is by then
        values[substitute(node, values)] = symbol
    return substitute(expr, values)
