"""Stage 1, the front end as a whole: a file or a text in, its specs out, or every error that it holds.

text ─read─▶ Source ─parse─▶ syntax.File ─define─▶ Scope ─resolve─▶ AttentionSpec

The last arrow is here, for one ``attention`` block at a time: every mistake of the block is in the report, and so is
what a correct spec states without effect (stage 1g, warnings).
"""

from __future__ import annotations

import keyword
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError, in_reading_order, quoted_list
from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, literal, score_input, walk
from flashgen.ir.spec import DEFAULT_SCALE, AttentionSpec, Schedule, Statement
from flashgen.ir.types import ElementType
from flashgen.ir.weights import Weights
from flashgen.language import statements, syntax
from flashgen.language.block import Block
from flashgen.language.imports import Library, Reader, load_library
from flashgen.language.nodes import Budget, Value
from flashgen.language.report import GiveUpError, Report, suggestion
from flashgen.language.text import excerpt, given_text, read_source
from flashgen.store.gallery import spec_file

MOST_HEAD_DIMS = 100  # of a file: of all its attentions


@dataclass(frozen=True)
class SpecFile:
    """The specs of one file, the file and its imports as ``sources`` (the file first), and what to warn of."""

    sources: tuple[Source, ...]
    specs: tuple[AttentionSpec, ...]
    warnings: tuple[Diagnostic, ...]


def parse_file(path: str | Path, constants: Mapping[str, Value] | None = None) -> SpecFile:
    """Read a file, or a spec of the gallery by its name; ``constants`` override the spec's.

    Raises ``SpecError`` with all errors.
    """
    return _specs(read_source(str(Path(spec_file(path)))), Reader(), constants or {})


def parse_text(
    text: str,
    name: str = "<text>",
    constants: Mapping[str, Value] | None = None,
    imports: Mapping[str, str] | None = None,
) -> SpecFile:
    """Read a text; ``imports`` maps names of files to their text, instead of the disk. Raises ``SpecError``."""
    return _specs(given_text(text, name), Reader(imports), constants or {})


def _specs(source: Source, reader: Reader, overrides: Mapping[str, Value]) -> SpecFile:
    report = Report()
    library: Library | None = None
    specs: list[AttentionSpec] = []
    budget = Budget()
    try:
        library = load_library(source, reader, report)
        blocks = [item for item in library.file.items if isinstance(item, syntax.Attention)]
        _check_blocks(blocks, source, report)
        _check_head_dims(blocks, report)
        _check_overrides(blocks, overrides, report)
        for block in blocks:
            spec = resolve(block, library, overrides, report, budget)
            if spec is not None:
                specs.append(spec)
    except GiveUpError:
        pass
    sources = library.sources if library is not None else (source,)
    found = in_reading_order(report.diagnostics, sources)
    if report.has_errors:
        raise SpecError(tuple(each for each in found if each.severity == "error"), sources)
    return SpecFile(sources, tuple(specs), found)


def _check_blocks(blocks: list[syntax.Attention], source: Source, report: Report) -> None:
    first: dict[str, Span] = {}
    for block in blocks:
        name = block.name
        if name.text in first:
            notes = (f"the first stands at line {first[name.text].line}",)
            report.add("E104", f"attention '{name.text}' is defined twice", name.span, notes=notes)
        first.setdefault(name.text, name.span)
    if not blocks and not report.has_errors:
        start = Span(source.name, 1, 1, 1, 1)
        hints = ("write 'attention NAME { head_dim 64 }'",)
        report.add("E009", "the file holds no 'attention' block", start, hints=hints)


def _check_head_dims(blocks: list[syntax.Attention], report: Report) -> None:
    """Each is planned for every target, which takes about 0.1 s."""
    statements = (each for block in blocks for each in block.statements if isinstance(each, syntax.HeadDims))
    stated = [value for each in statements for value in each.values]
    if len(stated) > MOST_HEAD_DIMS:
        message = f"the attentions of a file state {MOST_HEAD_DIMS} head dimensions at most, these {len(stated):,}"
        hints = ("state those that calls will have, or divide the attentions among files",)
        report.add("E314", message, stated[MOST_HEAD_DIMS].span, hints=hints)


def _check_overrides(blocks: list[syntax.Attention], overrides: Mapping[str, Value], report: Report) -> None:
    known = [
        statement.name.text
        for block in blocks
        for statement in block.statements
        if isinstance(statement, syntax.Const | syntax.Broken) and statement.name is not None
    ]
    for name in overrides:
        if name in known or not blocks:
            continue
        listed = quoted_list(dict.fromkeys(known), "and")
        plural = "the constants are" if len(set(known)) > 1 else "the only constant is"
        notes = (f"{plural} {listed}" if listed else "the file states no constants",)
        message, hints = f"there is no constant '{name}' to override", suggestion(name, known)
        report.add("E109", message, blocks[0].name.span, notes=notes, hints=hints)


_TOGETHER = {
    "mask": ("join conditions by 'and': 'mask causal and window(8)'",),
    "score": ("write one expression; 'let' names its parts",),
    "head_dim": ("name them in one: 'head_dim 64, 128'",),
    "dtype": ("name them in one: 'dtype f16, bf16'",),
}
_REPEATABLE = frozenset({"const", "param", "tensor", "let"})


def resolve(
    tree: syntax.Attention, library: Library, overrides: Mapping[str, Value], report: Report, budget: Budget
) -> AttentionSpec | None:
    """The meaning of one block of the library's file."""
    local = Report()
    block = Block(tree, library.scope, overrides, local, budget)
    parts: dict[str, list[Any]] = defaultdict(list)  # by the statement's word; what is wrong gives nothing
    try:
        _check_name(tree, local)
        _check_occurrences(tree, local)
        for position, statement in enumerate(tree.statements):
            block.position = position
            part = statements.meaning(block, statement)
            if part is not None:
                parts[statement.keyword].append(part)
        constants = tuple(block.constants())
        if local.has_errors or report.has_errors:  # an error in a definition empties what uses it
            return None
        spec = _spec(tree, parts, constants, library)
        warn(spec, block)
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


def _spec(
    tree: syntax.Attention,
    parts: Mapping[str, list[Any]],
    constants: tuple[tuple[str, Value], ...],
    library: Library,
) -> AttentionSpec:
    one = {word: found[-1] for word, found in parts.items()}
    dtypes = one.get("dtype")
    written = tuple(
        Statement(statement.keyword, excerpt(library.lines, statement.span), statement.span)
        for statement in tree.statements
    )
    return AttentionSpec(
        name=tree.name.text,
        head_dims=one["head_dim"],
        dtypes=None if dtypes is None else tuple(x for x in dtypes if x is not ElementType.F8E4M3),
        takes_f8=dtypes is None or ElementType.F8E4M3 in dtypes,
        constants=constants,
        params=tuple(parts.get("param", ())),
        tensors=tuple(parts.get("tensor", ())),
        scale=one.get("scale", DEFAULT_SCALE),
        score=one.get("score", score_input("s")),
        mask=one.get("mask", literal(True)),
        layout=one.get("layout"),
        select=one.get("select"),
        weights=one.get("weights", Weights()),
        dropout=one.get("dropout"),
        schedule=one.get("schedule", Schedule()),
        statements=written,
        sources=library.sources,
        span=tree.name.span,
    )


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
