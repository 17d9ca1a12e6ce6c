"""A spec back to the language's own text, for specs that were not written but traced.

In: an ``AttentionSpec``. Out: its statements, and text that parses to an equal one. Parts that occur twice become a
``let``; constants, which are worked out in a spec, are not declared again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flashgen.diagnostics.diagnostic import Source, Span
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, literal, score_input, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param, Schedule, Statement
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType

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
    if spec.scale != _default_scale():
        found.append(("scale", text(spec.scale)))
    taken = {*(each.name for each in spec.params), *(each.name for each in spec.tensors)}
    sections = _sections(spec)
    named = _names(list(sections.values()), taken)
    found += [("let", f"{symbol.name} = {text(_cut(expr, named))}") for expr, symbol in named.items()]
    for keyword, expr in sections.items():
        form = {"weights": spec.weights.form.written[-1], "layout": _layout_form(spec)}.get(keyword, "{}")
        found.append((keyword, form.format(text(_shortened(expr, named)))))
    if spec.select is not None:
        indices = [text(_shortened(each, named)) for each in spec.select.indices]
        found.append(("select", f"{spec.select.block}: {spec.select.tensor}[{', '.join((*indices, ':'))}]"))
    if spec.dropout is not None:
        found.append(("dropout", text(spec.dropout)))
    if spec.schedule != Schedule():
        pins = " ".join(f"{name} = {value}" for name, value in spec.schedule.pins.items())
        found.append(("schedule", f"{{ {pins} }}"))
    return found


def _default_scale() -> Expr:
    root = Apply(ScalarType.FLOAT, op="sqrt", args=(Apply(ScalarType.FLOAT, op="to_float", args=(_D,)),))
    return Apply(ScalarType.FLOAT, op="div", args=(literal(1.0), root))


_D = Symbol(ScalarType.INT, name="D", kind=SymbolKind.SIZE)


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


def _layout_form(spec: AttentionSpec) -> str:
    return "{}" if spec.layout is None else f"block {spec.layout.block}: {{}}"


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
