"""Definitions by name, what names stand for while an expression is resolved, and where its text is being read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashgen.diagnostics import Source, Span
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, walk
from flashgen.ir.types import ElementType
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


@dataclass(frozen=True)
class TensorName:
    """A tensor, which stands for a value only with its indices; ``usual`` are those that its shape suggests."""

    name: str
    element: ElementType
    usual: tuple[str, ...]
    span: Span

    @property
    def rank(self) -> int:
        return len(self.usual)

    def indexed(self, name: str) -> str:
        """How it is read under a name of it: ``bias[b, h, i, j]``."""
        return f"{name}[{', '.join(self.usual)}]"


Bound = Expr | TensorName | None  # None: reported before


@dataclass(frozen=True)
class Meaning:
    """What a name of the block stands for; ``uses`` are the run-time values that a ``let`` is made of."""

    value: Bound
    uses: tuple[tuple[str, SymbolKind | None], ...] = ()


@dataclass(frozen=True, eq=False)
class Frame:
    """Where text is read: in the block itself, or in the body of a definition that is being written out."""

    scope: Scope
    parameters: Mapping[str, Bound] = field(default_factory=dict)
    macro: Macro | None = None
    call: Span | None = None
    parent: Frame | None = None

    def place(self, span: Span) -> Span:
        """Where to point for something at ``span``: never into the prelude, but at what called it."""
        frame, shown = self, span
        while frame.macro is not None and frame.macro.standard and frame.parent is not None and frame.call is not None:
            shown, frame = frame.call, frame.parent
        return shown

    def notes(self) -> tuple[str, ...]:
        """How the text being read came to be there."""
        notes: list[str] = []
        frame = self
        while frame.macro is not None and frame.parent is not None and len(notes) < 3:
            if frame.macro.standard:
                notes.append(f"'{frame.macro.head}' is '{frame.macro.text}'")
            else:
                notes.append(f"in '{frame.macro.head}', used at {frame.parent.place(frame.call or frame.macro.span)}")
            frame = frame.parent
        return tuple(notes)


def run_time_values(expr: Expr) -> tuple[tuple[str, SymbolKind | None], ...]:
    """The symbols and tensors (kind None) that an expression is made of, each once."""
    found: dict[tuple[str, SymbolKind | None], None] = {}
    for node in walk(expr):
        if isinstance(node, Symbol):
            found[node.name, node.kind] = None
        elif isinstance(node, Load):
            found[node.tensor, None] = None
    return tuple(found)
