"""Definitions by name, and the scope that a file's text sees them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashgen.diagnostics import Source, Span
from flashgen.language import syntax
from flashgen.language.text import excerpt


@dataclass(frozen=True, eq=False)
class Macro:
    """A ``def``, with the scope that its body is read in. ``sound`` is False where its body has been reported."""

    name: str
    parameters: tuple[str, ...] | None
    body: syntax.Expression
    span: Span
    scope: Scope
    source: Source
    standard: bool  # of the prelude
    sound: bool = True

    @property
    def head(self) -> str:
        """The name with its parameters, as it is called."""
        return self.name if self.parameters is None else f"{self.name}({', '.join(self.parameters)})"

    @property
    def text(self) -> str:
        """The body as it is written, on one line."""
        return excerpt(self.source.text.split("\n"), self.body.span)


@dataclass(frozen=True, eq=False)
class Scope:
    """The definitions that one file sees: its own, those that it imports, and the prelude's.

    A name in a call and a name in any other place are different things: ``window(3)`` calls the prelude's
    definition even where a constant is called ``window``.
    """

    macros: Mapping[str, Macro] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()  # names that text with errors would have defined
    uncertain: bool = False  # whether an import is missing, so that any name may have come from it

    def excuses(self, name: str) -> bool:
        """Whether an unknown name is only the consequence of an error that has been reported."""
        return self.uncertain or name in self.lost

    def function(self, name: str) -> Macro | None:
        """The definition with parameters of that name."""
        macro = self.macros.get(name)
        return macro if macro is not None and macro.parameters is not None else None

    def value(self, name: str) -> Macro | None:
        """The definition without parameters of that name."""
        macro = self.macros.get(name)
        return macro if macro is not None and macro.parameters is None else None

    def function_names(self) -> Iterator[str]:
        return (name for name, macro in self.macros.items() if macro.parameters is not None)

    def value_names(self) -> Iterator[str]:
        return (name for name, macro in self.macros.items() if macro.parameters is None)
