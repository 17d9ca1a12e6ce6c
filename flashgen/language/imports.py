"""Stage 1b, imports: a file with everything that it imports, as one scope and a list of sources.

An import brings the definitions that stand in the imported file itself; its attention blocks and its own imports
stay there. Paths are relative to the importing file.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from flashgen.diagnostics import Diagnostic, Source, SpecError, render
from flashgen.language import syntax
from flashgen.language.definitions import define, exported
from flashgen.language.frames import Macro, Scope
from flashgen.language.parser import Parsed, parse
from flashgen.language.report import Report, suggestion
from flashgen.language.text import accepted, read_source

PRELUDE = "prelude.attn"
MAX_IMPORTS = 50


@dataclass(frozen=True)
class Reader:
    """Where imported files come from: given ``texts`` by full name or as the import writes it, or else the disk."""

    texts: Mapping[str, str] | None = None

    def read(self, name: str, written: str) -> Source:
        """The file of that name, ``written`` as in the import; raises ``SpecError``."""
        if self.texts is None:
            return read_source(name, imported=True)
        text = self.texts.get(name, self.texts.get(written))
        if text is None:
            raise SpecError((Diagnostic("E001", "the file does not exist", None),))
        return accepted(text, name)

    def may_be_shown(self, name: str) -> bool:
        """Whether messages may quote the file whatever stands in it: a spec that names files may come from anybody."""
        return self.texts is not None or Path(name).resolve().suffix == ".attn"


@dataclass(frozen=True)
class Library:
    """A file with its scope, the file's own source first among the sources."""

    file: syntax.File
    scope: Scope
    sources: tuple[Source, ...]
    lines: tuple[str, ...]  # of the file itself


@dataclass
class _Loader:
    """Follows imports; each file is read once."""

    reader: Reader
    report: Report
    sources: list[Source] = field(default_factory=list)
    exports: dict[str, Scope] = field(default_factory=dict)
    chain: list[str] = field(default_factory=list)

    def load(self, source: Source) -> tuple[Parsed, Scope]:
        """Parse a file and all that it imports."""
        self.sources.append(source)
        self.chain.append(source.name)
        parsed = parse(source)
        for diagnostic in parsed.diagnostics:
            self.report.put(diagnostic)
        known = dict(standard_definitions())
        lost = parsed.lost
        uncertain = any(isinstance(item, syntax.Broken) and item.keyword == "import" for item in parsed.file.items)
        for item in parsed.file.items:
            if isinstance(item, syntax.Import):
                imported = self._imported(item, source)
                if imported is None:
                    uncertain = True
                    continue
                self._bring_in(item, imported.macros, known)
                lost |= imported.lost
        scope = define(parsed.file.items, source, known, self.report, lost=lost, uncertain=uncertain)
        self.exports[source.name] = exported(scope, parsed.file.items)
        self.chain.pop()
        return parsed, scope

    def _imported(self, item: syntax.Import, importer: Source) -> Scope | None:
        """The definitions of an imported file; None where it could not be read."""
        name = posixpath.normpath(posixpath.join(posixpath.dirname(importer.name), item.path))
        if name in self.chain:
            circle = " → ".join(f"'{step}'" for step in (*self.chain[self.chain.index(name) :], name))
            self.report.add("E012", f"'{item.path}' imports this file again", item.path_span, notes=(circle,))
            return None
        if name in self.exports:
            return self.exports[name]
        if len(self.sources) > MAX_IMPORTS:
            message = f"there are more than {MAX_IMPORTS} imported files"
            self.report.add("E011", message, item.path_span)
            return None
        try:
            source = self.reader.read(name, item.path)
        except SpecError as error:
            self._unreadable(item, name, error)
            return None
        if not self.reader.may_be_shown(name) and parse(source).diagnostics:
            self._no_spec(item)
            return None
        self.load(source)
        return self.exports[name]

    def _unreadable(self, item: syntax.Import, name: str, error: SpecError) -> None:
        reason = error.diagnostics[0]
        if reason.code != "E001" and not self.reader.may_be_shown(name):
            self._no_spec(item)
            return
        if reason.code == "E001":
            message = f"cannot import '{item.path}': {reason.message}"
            hints = reason.hints or suggestion(name, self.reader.texts or ())
        else:
            message = f"cannot import '{item.path}': {reason.message} ({reason.span})"
            hints = reason.hints
        notes = (f"it was looked for at '{name}'",) if name != item.path else ()
        self.report.add("E011", message, item.path_span, notes=notes, hints=hints)

    def _no_spec(self, item: syntax.Import) -> None:
        hints = ("what is wrong in a file is shown where its name ends in .attn",)
        self.report.add("E011", f"cannot import '{item.path}': it is no spec", item.path_span, hints=hints)

    def _bring_in(self, item: syntax.Import, macros: Mapping[str, Macro], known: dict[str, Macro]) -> None:
        for name, macro in macros.items():
            if name in known and known[name] is not macro:
                notes = (f"'{name}' is defined at {known[name].span} and at {macro.span}",)
                message = f"the import brings '{name}', which another import has defined"
                self.report.add("E104", message, item.path_span, notes=notes)
            known.setdefault(name, macro)


@cache
def standard_definitions() -> Mapping[str, Macro]:
    """The prelude's definitions; the same for every file."""
    text = Path(__file__).with_name(PRELUDE).read_text(encoding="utf-8")
    source = Source(f"flashgen/language/{PRELUDE}", text)
    report = Report()
    parsed = parse(source)
    macros = define(parsed.file.items, source, {}, report, standard=True).macros
    if parsed.diagnostics or report.diagnostics:
        raise AssertionError(render((*parsed.diagnostics, *report.diagnostics), (source,)))
    return MappingProxyType(dict(macros))


def load_library(source: Source, reader: Reader, report: Report) -> Library:
    """The file with everything that it sees."""
    loader = _Loader(reader, report)
    parsed, scope = loader.load(source)
    return Library(parsed.file, scope, tuple(loader.sources), tuple(source.text.split("\n")))
