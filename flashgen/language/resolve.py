"""Stage 1f, resolve: one ``attention`` block to its ``AttentionSpec``.

In: the syntax of the block and the scope of its file. Out: the spec, or None where anything was wrong; every mistake
of the block is in the report.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashgen.diagnostics import Span
from flashgen.ir.expr import Expr, literal, score_input
from flashgen.ir.spec import (
    AttentionSpec,
    CapturedTensor,
    HeadDim,
    Layout,
    Param,
    Schedule,
    Select,
    Statement,
)
from flashgen.ir.types import ElementType
from flashgen.ir.weights import Weights
from flashgen.language import statements, syntax
from flashgen.language.block import Block
from flashgen.language.checks import warn
from flashgen.language.constants import Value
from flashgen.language.imports import Library
from flashgen.language.nodes import Budget
from flashgen.language.report import Report
from flashgen.language.text import excerpt

_TOGETHER = {
    "mask": ("join conditions by 'and': 'mask causal and window(8)'",),
    "score": ("write one expression; 'let' names its parts",),
    "head_dim": ("name them in one: 'head_dim 64, 128'",),
    "dtype": ("name them in one: 'dtype f16, bf16'",),
}
_REPEATABLE = frozenset({"const", "param", "tensor", "let"})


@dataclass
class _Parts:
    """What the statements have given so far; None: not stated, or wrong."""

    head_dims: tuple[HeadDim, ...] | None = None
    dtypes: tuple[ElementType, ...] | None = None
    params: list[Param] = field(default_factory=list)
    tensors: list[CapturedTensor] = field(default_factory=list)
    scale: Expr | None = None
    score: Expr | None = None
    mask: Expr | None = None
    layout: Layout | None = None
    select: Select | None = None
    weights: Weights | None = None
    dropout: Expr | None = None
    schedule: Schedule | None = None


def resolve(
    tree: syntax.Attention, library: Library, overrides: Mapping[str, Value], report: Report, budget: Budget
) -> AttentionSpec | None:
    """The meaning of one block of the library's file."""
    local = Report()
    block = Block(tree, library.scope, overrides, local, budget)
    parts = _Parts()
    try:
        _check_name(tree, local)
        _check_occurrences(tree, local)
        for position, statement in enumerate(tree.statements):
            block.position = position
            _read(block, statement, parts)
        constants = tuple(block.constants())
        if local.has_errors or report.has_errors:  # an error in a definition empties what uses it
            return None
        spec = _spec(tree, parts, constants, library)
        warn(spec, block, tree)
    finally:
        for diagnostic in local.diagnostics:
            report.put(diagnostic)
    return spec


def _check_name(tree: syntax.Attention, report: Report) -> None:
    name = tree.name.text
    if keyword.iskeyword(name):
        message = f"'{name}' is a word of Python and cannot name an attention, which becomes a module"
        report.add("E111", message, tree.name.span, hints=(f"choose another name, for example '{name}_'",))
    elif len(name) > 4 and name.startswith("__") and name.endswith("__"):
        message = f"'{name}' is kept by Python for itself and cannot name an attention, which becomes a module"
        report.add("E111", message, tree.name.span, hints=(f"choose another name, for example '{name.strip('_')}'",))


def _check_occurrences(tree: syntax.Attention, report: Report) -> None:
    first: dict[str, Span] = {}
    for statement in tree.statements:
        word = statement.word
        if statement.keyword in first and statement.keyword not in _REPEATABLE:
            notes = (f"the first stands at line {first[statement.keyword].line}",)
            hints = _TOGETHER.get(statement.keyword, ())
            report.add("E302", f"the statement '{statement.keyword}' occurs twice", word, notes=notes, hints=hints)
        first.setdefault(statement.keyword, word)
    if "head_dim" not in first:
        message = f"attention '{tree.name.text}' does not state its head dimensions"
        report.add("E301", message, tree.name.span, hints=("add a line such as 'head_dim 64, 128'",))


def _read(block: Block, statement: syntax.Statement, parts: _Parts) -> None:
    """Resolve one statement into its part."""
    match statement:
        case syntax.Let():
            block.define_let(statement)
        case syntax.Param():
            param = statements.param(block, statement)
            if param is not None:
                parts.params.append(param)
        case syntax.Tensor():
            tensor = statements.tensor(block, statement)
            if tensor is not None:
                parts.tensors.append(tensor)
        case syntax.HeadDims():
            parts.head_dims = statements.head_dims(block, statement)
        case syntax.Dtypes():
            parts.dtypes = statements.dtypes(block, statement)
        case syntax.Layout():
            parts.layout = statements.layout(block, statement)
        case syntax.Select():
            parts.select = statements.select(block, statement)
        case syntax.Schedule():
            parts.schedule = statements.schedule(block, statement)
        case syntax.Single():
            _read_single(block, statement, parts)
        case _:
            pass  # constants are worked out when asked for; broken statements have been reported


def _read_single(block: Block, statement: syntax.Single, parts: _Parts) -> None:
    match statement.keyword:
        case "scale":
            parts.scale = statements.scale(block, statement)
        case "score":
            parts.score = statements.score(block, statement)
        case "mask":
            parts.mask = statements.mask(block, statement)
        case "weights":
            parts.weights = statements.weights(block, statement)
        case "dropout":
            parts.dropout = statements.dropout(block, statement)
        case word:
            raise AssertionError(f"no rule for the statement {word}")


def _spec(
    tree: syntax.Attention,
    parts: _Parts,
    constants: tuple[tuple[str, Value], ...],
    library: Library,
) -> AttentionSpec:
    assert parts.head_dims is not None
    written = tuple(
        Statement(statement.keyword, excerpt(library.lines, statement.span), statement.span)
        for statement in tree.statements
    )
    return AttentionSpec(
        name=tree.name.text,
        head_dims=parts.head_dims,
        dtypes=None if parts.dtypes is None else tuple(x for x in parts.dtypes if x is not ElementType.F8E4M3),
        takes_f8=parts.dtypes is None or ElementType.F8E4M3 in parts.dtypes,
        constants=constants,
        params=tuple(parts.params),
        tensors=tuple(parts.tensors),
        scale=parts.scale or statements.default_scale(),
        score=parts.score or score_input("s"),
        mask=parts.mask or literal(True),
        layout=parts.layout,
        select=parts.select,
        weights=parts.weights or Weights(),
        dropout=parts.dropout,
        schedule=parts.schedule or Schedule(),
        statements=written,
        sources=library.sources,
        span=tree.name.span,
    )
