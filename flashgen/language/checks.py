"""Stage 1g, warnings: what a correct spec states without effect. In: a spec and its syntax. Out: warnings."""

from __future__ import annotations

from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, literal, walk
from flashgen.ir.spec import AttentionSpec
from flashgen.language import syntax
from flashgen.language.block import Block


def warn(spec: AttentionSpec, block: Block) -> None:
    """Report names that are never used and statements that change nothing."""
    for declaration in block.declarations.values():
        if declaration.name not in block.used and declaration.statement is not None:
            what = declaration.statement.keyword
            message = f"the {what} '{declaration.name}' is never used"
            block.report.add("W502", message, declaration.span, hints=("leave it out",))
    stated = {statement.keyword: statement for statement in block.tree.statements}
    score_counts = spec.weights.weight is None or _uses(spec.weights.weight, "s")
    if "score" in stated and not score_counts:
        _without_effect(block, stated["score"], "the weights do not use 's'")
    if "scale" in stated and not (score_counts and _uses(spec.score, "s")):
        _without_effect(block, stated["scale"], f"the {'score does' if score_counts else 'weights do'} not use 's'")
    empty = stated.get("schedule")
    if isinstance(empty, syntax.Schedule) and not empty.entries:
        _without_effect(block, empty, "it pins nothing")
    for word, expr in (("mask", spec.mask), ("layout", spec.layout.keep if spec.layout else literal(True))):
        if word in stated and isinstance(expr, Literal) and not expr.value:
            message = f"the {word} keeps no pair, so every output is zero"
            block.report.add("W504", message, stated[word].word)


def _without_effect(block: Block, statement: syntax.Statement, reason: str) -> None:
    message = f"'{statement.keyword}' has no effect: {reason}"
    block.report.add("W503", message, statement.word, hints=("leave the statement out",))


def _uses(expr: Expr, name: str) -> bool:
    return any(isinstance(node, Symbol) and node.kind is SymbolKind.SCORE and node.name == name for node in walk(expr))
