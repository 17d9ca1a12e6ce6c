"""Expressions and specs for tests of the IR, written as Python text, without the language's own parser."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import reduce

from flashgen.diagnostics.diagnostic import Source, Span
from flashgen.ir.build import apply, conjunction, constant, power
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, literal, score_input, size
from flashgen.ir.spec import (
    AttentionSpec,
    CapturedTensor,
    HeadDim,
    Layout,
    Schedule,
    Statement,
)
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import Weights

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor", ast.LShift: "shl", ast.RShift: "shr",
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_NAMES: dict[str, Expr] = {
    **{name: index(name) for name in ("b", "h", "i", "j", "hkv")},
    **{name: size(name) for name in ("B", "H", "Hkv", "Nq", "Nk", "D", "Dv")},
    **{name: score_input(name) for name in ("s", "dot", "sqdist")},
    **{name: Symbol(ScalarType.INT, name=name, kind=SymbolKind.BLOCK) for name in ("I", "J")},
    "inf": literal(float("inf")),
    "pi": literal(3.141592653589793),
    "true": literal(True),
    "false": literal(False),
}

PRELUDE = {
    "causal": "j <= i",
    "causal_lower_right": "j <= i + Nk - Nq",
    "window_left": "i - j < w",
    "window": "abs(i - j) <= w",
    "prefix": "j < p",
    "same_document": "doc[b, i] == doc[b, j]",
    "chunked": "i // c == j // c",
    "dilated": "abs(i - j) <= w and (i - j) % r == 0",
    "sink_window": "j < n or i - j < w",
    "global_tokens": "i < n or j < n",
    "strided": "i - j < l or (i - j) % l == 0",
    "fixed": "i // l == j // l or j % l >= l - c",
    "neighborhood_2d": (
        "abs(clamp(i // width, r, height - 1 - r) - j // width) <= r"
        " and abs(clamp(i % width, r, width - 1 - r) - j % width) <= r"
    ),
}
LAYOUTS = {
    "local_global": "abs(I - J) <= w or I < g or J < g",
    "butterfly": "I == J or (popcount(I ^ J) == 1 and (I ^ J) < 2**k)",
    "random_blocks": "hash(I, J, seed) % 1024 < 1024 * p",
}

Tensors = Mapping[str, tuple[str, tuple[str, ...]]]


def expr(code: str, tensors: Tensors | None = None, **values: Expr | float) -> Expr:
    """The expression that ``code`` writes; ``values`` are numbers or expressions by name."""
    return _read(code, tensors or {}, values, None)


def _read(code: str, tensors: Tensors, values: Mapping[str, Expr | float], source: Source | None) -> Expr:
    names = _NAMES | {name: v if isinstance(v, Expr) else constant(v) for name, v in values.items()}
    return _Reader(names, tensors, source, code).read(ast.parse(code.strip(), mode="eval").body)


class _Reader:
    def __init__(self, names: Mapping[str, Expr], tensors: Tensors, source: Source | None, code: str) -> None:
        self.names, self.tensors, self.source, self.code = names, tensors, source, code.strip()

    def span(self, node: ast.expr) -> Span | None:
        if self.source is None:
            return None
        before, _, _ = self.source.text.partition(self.code)
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        assert node.end_col_offset is not None
        return Span(self.source.name, line, column + node.col_offset, line, column + node.end_col_offset)

    def read(self, node: ast.expr) -> Expr:
        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                return constant(value)
            case ast.Name(id=name):
                return self.names[name]
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return power(self.read(left), self.read(right))
            case ast.BinOp(left=left, op=operation, right=right):
                return apply(_BINARY[type(operation)], self.read(left), self.read(right))
            case ast.UnaryOp(op=sign, operand=operand):
                return apply("not" if isinstance(sign, ast.Not) else "neg", self.read(operand))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return apply("where", self.read(test), self.read(body), self.read(orelse))
            case ast.Call(func=ast.Name(id=name), args=args):
                row = {"int": "to_int", "float": "to_float"}.get(name, name)
                return apply(row, *(self.read(each) for each in args))
            case ast.Subscript(value=ast.Name(id=name), slice=place):
                indices = place.elts if isinstance(place, ast.Tuple) else [place]
                element = ElementType(self.tensors[name][0])
                found = tuple(self.read(each) for each in indices)
                return Load(element.scalar, tensor=name, indices=found, span=self.span(node))
        return self.read_logic(node)

    def read_logic(self, node: ast.expr) -> Expr:
        match node:
            case ast.BoolOp(op=join, values=values):
                name = "and" if isinstance(join, ast.And) else "or"
                return reduce(lambda x, y: apply(name, x, y), map(self.read, values))
            case ast.Compare(left=left, ops=relations, comparators=rights):
                operands = [self.read(each) for each in (left, *rights)]
                pairs = zip(relations, operands, operands[1:], strict=False)
                return conjunction(*(apply(_COMPARE[type(relation)], x, y) for relation, x, y in pairs))
        raise AssertionError(ast.dump(node))


def formula(name: str, tensors: Tensors | None = None, **values: Expr | float) -> Expr:
    """A mask or layout of the prelude."""
    return _read((PRELUDE | LAYOUTS)[name], tensors or {}, values, None)


def spec(
    score: str = "s",
    mask: str = "true",
    *,
    tensors: Tensors | None = None,
    lets: Mapping[str, str] | None = None,
    weights: Weights | None = None,
    layout: tuple[int, str] | None = None,
    **constants: float,
) -> AttentionSpec:
    """A spec over one head dimension, 64; its source holds the lets, the score and the mask, a line each."""
    tensors = tensors or {}
    lines = ["attention test {", *(f"    let {n} = {code}" for n, code in (lets or {}).items())]
    lines += [f"    score {score}", f"    mask {mask}", "}"]
    source = Source("test.attn", "\n".join(lines) + "\n")
    names: dict[str, Expr | float] = dict(constants)
    for name, code in (lets or {}).items():
        names[name] = _read(code, tensors, names, source)
    statements = [
        Statement("let", f"let {name} = {code}", Span(source.name, 2 + k, 5, 2 + k, 5 + len(f"let {name} = {code}")))
        for k, (name, code) in enumerate((lets or {}).items())
    ]
    captured = tuple(
        CapturedTensor(name, ElementType(element), tuple(_read(each, {}, names, None) for each in shape), grad=False)
        for name, (element, shape) in tensors.items()
    )
    return AttentionSpec(
        name="test",
        head_dims=(HeadDim(64, 64),),
        dtypes=None,
        takes_f8=True,
        constants=tuple(constants.items()),
        params=(),
        tensors=captured,
        scale=literal(0.125),
        score=_read(score, tensors, names, source),
        mask=_read(mask, tensors, names, source),
        layout=None if layout is None else Layout(layout[0], _read(layout[1], tensors, names, source)),
        weights=weights or Weights(),
        dropout=None,
        schedule=Schedule(),
        statements=tuple(statements),
        sources=(source,),
    )
