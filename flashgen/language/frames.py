"""What names stand for while an expression is resolved, and where its text is being read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashgen.diagnostics import Span
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, walk
from flashgen.ir.types import ElementType
from flashgen.language.library import Macro, Scope


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
