"""From the parser's reductions to the syntax tree, bottom-up: nothing here recurses.

The grammar keeps all tokens, so the first and the last child of a rule are where its text starts and ends; that
is how every node gets its span (lark's own position pass does not reach into trees that are not lark's).
"""

from __future__ import annotations

from typing import Any

from lark import Token, Transformer, v_args

from flashgen.diagnostics import Span
from flashgen.language import syntax

# Deeper text is refused before anything recurses over it; the IR has its own, smaller limit on what it expands to.
MAX_NESTING = 200


class Word(Token):
    """A token with its span; ``broken`` carries what recovery puts in place of a statement."""

    span: Span
    broken: syntax.Broken | None

    @staticmethod
    def make(kind: str, text: str, span: Span, broken: syntax.Broken | None = None) -> Word:
        word = Word(kind, text)
        word.span = span
        word.broken = broken
        return word


class TooDeepError(Exception):
    """An expression is nested more than ``MAX_NESTING`` deep."""

    def __init__(self, span: Span) -> None:
        super().__init__("nested too deeply")
        self.span = span


def _checked(node: syntax.Expression) -> syntax.Expression:
    if node.depth > MAX_NESTING:
        raise TooDeepError(node.span)
    return node


def _expressions(children: tuple[Any, ...]) -> tuple[syntax.Expression, ...]:
    return tuple(child for child in children if isinstance(child, syntax.Expression))


def _names(children: tuple[Any, ...]) -> tuple[syntax.Name, ...]:
    return tuple(child for child in children if isinstance(child, syntax.Name))


def _grad(last: object) -> Span | None:
    return last.span if isinstance(last, Word) and last.type == "GRAD" else None


@v_args(inline=True)
class TreeBuilder(Transformer[Token, syntax.File]):
    """One method for each rule of ``attn.lark``; stateless."""

    # --- a file

    def start(self, *items: syntax.Item) -> syntax.File:
        return syntax.File(items)

    def import_(self, _word: Word, path: Word) -> syntax.Import:
        return syntax.Import(str(path)[1:-1], path.span)

    def definition(self, _word: Word, name: syntax.Name, *rest: Any) -> syntax.Definition:
        parameters = _names(rest) if isinstance(rest[0], Word) and rest[0].type == "LPAR" else None
        return syntax.Definition(name, parameters, rest[-1])

    def attention(self, _word: Word, name: syntax.Name, _open: Word, *rest: Any) -> syntax.Attention:
        return syntax.Attention(name, rest[:-1])

    def broken(self, word: Word) -> syntax.Broken:
        assert word.broken is not None
        return word.broken

    # --- statements

    def head_dim(self, word: Word, *rest: Any) -> syntax.HeadDims:
        return syntax.HeadDims(word.span.to(rest[-1].span), "head_dim", _expressions(rest))

    def dtype(self, word: Word, *rest: Any) -> syntax.Dtypes:
        return syntax.Dtypes(word.span.to(rest[-1].span), "dtype", _names(rest))

    def const(self, word: Word, name: syntax.Name, _sign: Word, value: syntax.Expression) -> syntax.Const:
        return syntax.Const(word.span.to(value.span), "const", name, value)

    def param(self, word: Word, name: syntax.Name, _sign: Word, kind: syntax.Name, *rest: Any) -> syntax.Param:
        default = next(iter(_expressions(rest)), None)
        last = rest[-1] if rest else kind
        return syntax.Param(word.span.to(last.span), "param", name, kind, default, _grad(last))

    def tensor(self, word: Word, name: syntax.Name, _sign: Word, kind: syntax.Name, *rest: Any) -> syntax.Tensor:
        last = rest[-1]
        return syntax.Tensor(word.span.to(last.span), "tensor", name, kind, _expressions(rest), _grad(last))

    def let(self, word: Word, name: syntax.Name, _sign: Word, value: syntax.Expression) -> syntax.Let:
        return syntax.Let(word.span.to(value.span), "let", name, value)

    def layout(
        self, word: Word, _block: Word, block: syntax.Expression, _sign: Word, value: syntax.Expression
    ) -> syntax.Layout:
        return syntax.Layout(word.span.to(value.span), "layout", block, value)

    def select(
        self, word: Word, block: syntax.Expression, _sign: Word, tensor: syntax.Name, _open: Word, *rest: Any
    ) -> syntax.Select:
        slots = [each for each in rest[:-1] if not isinstance(each, Word) or each.type == "COLON"]
        places = tuple(each.span if isinstance(each, Word) else each for each in slots)
        return syntax.Select(word.span.to(rest[-1].span), "select", block, tensor, places)

    def schedule(self, word: Word, *rest: Any) -> syntax.Schedule:
        return syntax.Schedule(word.span.to(rest[-1].span), "schedule", tuple(rest[1:-1]))

    def entry(self, name: syntax.Name, _sign: Word, value: syntax.Expression) -> syntax.Entry:
        return syntax.Entry(name, value)

    def single(self, word: Word, value: syntax.Expression) -> syntax.Single:
        return syntax.Single(word.span.to(value.span), str(word), value)

    # --- expressions

    def name(self, word: Word) -> syntax.Name:
        return syntax.Name(str(word), word.span)

    def reference(self, name: syntax.Name) -> syntax.Expression:
        return syntax.Reference(name.span, name.text)

    def number(self, word: Word) -> syntax.Expression:
        return syntax.Number(word.span, str(word))

    def boolean(self, word: Word) -> syntax.Expression:
        return syntax.Boolean(word.span, word.type == "TRUE")

    def group(self, opening: Word, inner: syntax.Expression, closing: Word) -> syntax.Expression:
        return _checked(syntax.Group(opening.span.to(closing.span), inner))

    def unary(self, word: Word, operand: syntax.Expression) -> syntax.Expression:
        return _checked(syntax.Unary(word.span.to(operand.span), str(word), operand))

    def binary(self, left: syntax.Expression, word: Word, right: syntax.Expression) -> syntax.Expression:
        return _checked(syntax.Binary(left.span.to(right.span), str(word), left, right))

    def compare(self, *parts: Any) -> syntax.Expression:
        operators = tuple(str(word) for word in parts[1::2])
        return _checked(syntax.Compare(parts[0].span.to(parts[-1].span), parts[::2], operators))

    def conditional(
        self, yes: syntax.Expression, _if: Word, condition: syntax.Expression, _else: Word, no: syntax.Expression
    ) -> syntax.Expression:
        return _checked(syntax.Conditional(yes.span.to(no.span), yes, condition, no))

    def index(self, base: syntax.Expression, _open: Word, indices: Any, close: Word) -> syntax.Expression:
        return _checked(syntax.Index(base.span.to(close.span), base, indices))

    def call(self, callee: syntax.Expression, *rest: Any) -> syntax.Expression:
        arguments = rest[1] if len(rest) == 3 else ()
        return _checked(syntax.Call(callee.span.to(rest[-1].span), callee, arguments))

    def arguments(self, *parts: Any) -> tuple[syntax.Expression, ...]:
        return _expressions(parts)

    def named(self, name: syntax.Name, _sign: Word, value: syntax.Expression) -> syntax.Expression:
        return syntax.Named(name.span.to(value.span), name, value)
