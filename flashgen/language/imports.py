"""Stage 1b, imports: a file with everything that it imports, as one scope and a list of sources.

Names and calls inside the body of a ``def`` are checked here, once; types only where a definition is used.

An import brings the definitions that stand in the imported file itself; its attention blocks and its own imports
stay there. Paths are relative to the importing file.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from flashgen.diagnostics import Diagnostic, Source, SpecError, render
from flashgen.language import names, syntax
from flashgen.language.names import FUNCTIONS, Macro, Scope
from flashgen.language.parser import Parsed, parse
from flashgen.language.report import Report, suggestion, unknown_function, wrong_count
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


def define(
    items: Iterable[syntax.Item],
    source: Source,
    known: Mapping[str, Macro],
    report: Report,
    *,
    lost: frozenset[str] = frozenset(),
    uncertain: bool = False,
    standard: bool = False,
) -> Scope:
    """The scope of a file: ``known`` (prelude and imports) and the file's own definitions.

    ``lost`` and ``uncertain`` are as in ``Scope``; ``standard``: the file is the prelude.
    """
    macros = dict(known)
    broken = {item.name.text for item in items if isinstance(item, syntax.Broken) and item.name is not None}
    scope = Scope(macros, lost | broken, uncertain)
    own: dict[str, Macro] = {}
    for item in items:
        if isinstance(item, syntax.Definition) and _may_define(item, macros, own, report):
            parameters = None if item.parameters is None else tuple(name.text for name in item.parameters)
            macro = Macro(item.name.text, parameters, item.body, item.name.span, scope, source, standard)
            own[macro.name] = macros[macro.name] = macro
    for macro in own.values():
        if not _body_is_sound(macro, scope, report):
            macros[macro.name] = replace(macro, sound=False)
    _check_recursion(own, macros, report)
    return scope


def _may_define(item: syntax.Definition, macros: Mapping[str, Macro], own: Mapping[str, Macro], report: Report) -> bool:
    name = item.name.text
    if name in names.BUILTINS or name in FUNCTIONS or name in names.WEIGHT_FORMS:
        kind = "function" if name in FUNCTIONS else "form of weights" if name in names.WEIGHT_FORMS else "name"
        report.add("E105", f"'{name}' is a built-in {kind} and cannot be defined again", item.name.span)
        return False
    if name in own:
        report.add("E104", f"'{name}' is defined twice", item.name.span, notes=(_defined_at(own[name]),))
        return False
    if name in macros and macros[name].standard:
        notes = (f"in the prelude '{macros[name].head}' is '{macros[name].text}'",)
        message = f"'{name}' is a name of the prelude and cannot be redefined"
        report.add("E105", message, item.name.span, notes=notes, hints=("choose another name",))
        return False
    if name in macros:
        notes = (_defined_at(macros[name]),)
        report.add("E104", f"'{name}' is already defined by an import", item.name.span, notes=notes)
        return False
    seen: set[str] = set()
    for parameter in item.parameters or ():
        if parameter.text in seen:
            report.add("E104", f"the parameter '{parameter.text}' occurs twice", parameter.span)
        seen.add(parameter.text)
    return True


def _defined_at(macro: Macro) -> str:
    return f"'{macro.name}' is defined at {macro.span}"


def expressions_below(root: syntax.Expression) -> Iterator[syntax.Expression]:
    """Every expression inside ``root`` and itself, in reading order, without recursion."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))


def _body_is_sound(macro: Macro, scope: Scope, report: Report) -> bool:
    """Check the names and calls of a body; False where something was reported or cannot be judged."""
    parameters = set(macro.parameters or ())
    sound = True
    for name, call in _uses(macro.body):
        if call is not None:
            sound &= _call_is_sound(call, name, parameters, scope, report)
        else:
            sound &= _name_is_sound(name, parameters, scope, report)
    return sound


def _uses(body: syntax.Expression) -> Iterator[tuple[syntax.Reference, syntax.Call | None]]:
    """The names that a body uses, each with the call whose callee it is."""
    callees: set[int] = set()
    for node in expressions_below(body):
        if isinstance(node, syntax.Call) and isinstance(node.callee, syntax.Reference):
            callees.add(id(node.callee))
            yield node.callee, node
        elif isinstance(node, syntax.Reference) and id(node) not in callees:
            yield node, None


def _call_is_sound(
    call: syntax.Call, callee: syntax.Reference, parameters: set[str], scope: Scope, report: Report
) -> bool:
    name = callee.name
    macro = scope.function(name)
    if macro is not None or name in FUNCTIONS:
        wrong = wrong_count(name, macro, len(call.arguments))
        if wrong is not None:
            report.add("E202", wrong[0], call.span, hints=wrong[1])
        return wrong is None
    if name in parameters or name in names.WEIGHT_FORMS or name in names.BUILTINS or scope.value(name):
        return True  # reported where it is used
    if not scope.excuses(name):
        known = (*FUNCTIONS, *scope.function_names())
        report.add("E102", f"unknown function '{name}'", callee.span, hints=unknown_function(name, known))
    return False


def _name_is_sound(node: syntax.Reference, parameters: set[str], scope: Scope, report: Report) -> bool:
    name = node.name
    if name in parameters or name in names.BUILTINS or name in scope.macros or name in FUNCTIONS:
        return True
    if name in names.WEIGHT_FORMS:
        return True
    if scope.excuses(name):
        return False
    known = (*parameters, *names.BUILTINS, *scope.value_names(), "true", "false")
    hints = suggestion(name, known) or (f"a 'def' sees its parameters only; pass '{name}' as one",)
    report.add("E101", f"unknown name '{name}'", node.span, hints=hints)
    return False


def _check_recursion(own: Mapping[str, Macro], macros: dict[str, Macro], report: Report) -> None:
    """Report the circles among definitions; depth first, each definition once."""
    done: set[str] = set()
    for start in own:
        path: list[str] = []
        pending: list[Iterator[str]] = [iter((start,))]
        while pending:
            name = next(pending[-1], None)
            if name is None:
                pending.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                _report_circle(path[path.index(name) :], macros, report)
            elif name in own and name not in done:
                path.append(name)
                parameters = own[name].parameters or ()  # a callee is never one
                used = [each.name for each, call in _uses(own[name].body) if call or each.name not in parameters]
                pending.append(iter(used))


def _report_circle(circle: list[str], macros: dict[str, Macro], report: Report) -> None:
    macro = macros[circle[0]]
    shown = [f"'{name}'" for name in circle]
    way = [*shown[:3], "…", *shown[-2:]] if len(shown) > 6 else shown
    notes = (" → ".join((*way, shown[0])),) if len(circle) > 1 else ()
    hints = ("definitions are written out where they are used, so none can use itself",)
    report.add("E307", f"'{macro.name}' is defined by itself", macro.span, notes=notes, hints=hints)
    macros[macro.name] = replace(macro, sound=False)


def exported(scope: Scope, items: Iterable[syntax.Item]) -> Scope:
    """The definitions that stand in a file itself, for the files that import it."""
    own = {item.name.text for item in items if isinstance(item, syntax.Definition)}
    macros = {name: macro for name, macro in scope.macros.items() if name in own and not macro.standard}
    return Scope(macros, scope.lost)
