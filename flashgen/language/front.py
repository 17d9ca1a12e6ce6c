"""Stage 1, the front end as a whole: a file or a text in, its specs out, or every error that it holds.

text ─read─▶ Source ─parse─▶ syntax.File ─define─▶ Scope ─resolve─▶ AttentionSpec
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError, in_reading_order, quoted_list
from flashgen.ir.spec import AttentionSpec
from flashgen.language import syntax
from flashgen.language.constants import Value
from flashgen.language.imports import Library, Reader, load_library
from flashgen.language.nodes import Budget
from flashgen.language.report import GiveUpError, Report, suggestion
from flashgen.language.resolve import resolve
from flashgen.language.text import given_text, read_source
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
