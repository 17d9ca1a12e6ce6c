"""Short ways to what the tests look at."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.diagnostics import Source, SpecError
from flashgen.ir.build import fold
from flashgen.ir.expr import Apply, Expr, Literal, Symbol
from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_text, syntax
from flashgen.language.parser import parse


def spec(body: str, constants: Mapping[str, bool | int | float] | None = None, before: str = "") -> AttentionSpec:
    """The one spec whose block holds ``head_dim 64`` and ``body``."""
    return parse_text(f"{before}\nattention a {{ head_dim 64\n{body}\n}}", constants=constants).specs[0]


def score(text: str, before: str = "") -> Expr:
    return spec(f"score {text}", before=before).score


def mask(text: str, before: str = "") -> Expr:
    return spec(f"mask {text}", before=before).mask


def constant(text: str) -> bool | int | float:
    """The value of a constant expression."""
    return dict(spec(f"const x = {text}").constants)["x"]


def codes(text: str) -> list[str]:
    """The codes of all errors of a text, in their order."""
    try:
        parse_text(text, imports={})
    except SpecError as error:
        return [each.code for each in error.diagnostics]
    return []


def codes_of(body: str) -> list[str]:
    return codes(f"attention a {{ head_dim 64\n{body}\n}}")


def tree(text: str) -> syntax.Expression:
    """The syntax of an expression."""
    parsed = parse(Source("x", f"def f = {text}"))
    assert not parsed.diagnostics
    definition = parsed.file.items[0]
    assert isinstance(definition, syntax.Definition)
    return definition.body


def value(expr: Expr, symbols: Mapping[str, bool | int | float]) -> bool | int | float:
    """What an expression without tensors evaluates to."""
    match expr:
        case Literal(value=number):
            return number
        case Symbol(name=name):
            return symbols[name]
        case Apply(op=op, args=args):
            return fold(op, *(value(argument, symbols) for argument in args))
    raise AssertionError(expr)
