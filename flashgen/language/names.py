"""The names and signs that the language gives meaning to, the places where each may stand, and definitions by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flashgen.diagnostics import Source, Span
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, literal, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import FORMS
from flashgen.language import syntax
from flashgen.language.text import excerpt

# The name in the language to the operator of the IR. 'pow' is decided by the types, like '**'.
FUNCTIONS: Mapping[str, str] = MappingProxyType({row.function: name for name, row in OPERATORS.items() if row.function})

# The sign or word between two operands. Of a sign that two rows share the first is meant, and types decide.
INFIX: Mapping[str, str] = MappingProxyType(
    {
        row.spelling: name
        for name, row in reversed(tuple(OPERATORS.items()))
        if row.arity == 2 and row.spelling != row.function
    }
)


INDICES = ("b", "h", "i", "j", "hkv")
BLOCKS = ("I", "J")
SIZES = ("B", "H", "Hkv", "Nq", "Nk", "D", "Dv")
SCORES = ("s", "dot", "sqdist")
CONSTANTS = {"inf": math.inf, "pi": math.pi}
WEIGHT_FORMS = tuple(form.word for form in FORMS.values() if form.word)

_KINDS = {
    **dict.fromkeys(INDICES, SymbolKind.INDEX),
    **dict.fromkeys(BLOCKS, SymbolKind.BLOCK),
    **dict.fromkeys(SIZES, SymbolKind.SIZE),
    **dict.fromkeys(SCORES, SymbolKind.SCORE),
}
INDEX_OF = {"B": "b", "H": "h", "Hkv": "hkv", "Nq": "i", "Nk": "j"}
BUILTINS = frozenset((*_KINDS, *CONSTANTS))

_MEANING = {
    "b": "the batch index",
    "h": "the query head",
    "i": "the query position",
    "j": "the key position",
    "hkv": "the key/value head of 'h'",
    "I": "the block row",
    "J": "the block column",
    "s": "the score so far",
    "dot": "q_i · k_j",
    "sqdist": "‖q_i − k_j‖²",
}
_HOME = {
    **dict.fromkeys(INDICES, "'score', 'mask', 'layout', 'select' and 'weights'"),
    "i": "'score', 'mask', 'select' and 'weights'",
    "j": "'score', 'mask' and 'weights'",
    **dict.fromkeys(BLOCKS, "'layout' only"),
    "s": "'score' and 'weights' only",
    "dot": "'score' only",
    "sqdist": "'score' only",
}


def builtin(name: str, span: Span | None) -> Expr:
    """The node of a built-in name."""
    if name in CONSTANTS:
        return literal(CONSTANTS[name], span)
    kind = _KINDS[name]
    scalar = ScalarType.FLOAT if kind is SymbolKind.SCORE else ScalarType.INT
    return Symbol(scalar, name=name, kind=kind, span=span)


@dataclass(frozen=True)
class Site:
    """A place in a spec where an expression stands, and which run-time values it may use there."""

    title: str  # as in "cannot be used in 'mask'"
    symbols: frozenset[str]
    params: bool
    tensors: bool
    instead: str = ""  # a hint for what to do with a value that cannot be used here
    code: str = "E108"

    def objection(self, name: str, kind: SymbolKind | None) -> tuple[str, str] | None:
        """Why a name (``kind`` None: a tensor) cannot stand here, with the fact behind it; None where it can."""
        if kind is None:
            allowed = self.tensors
        elif kind is SymbolKind.PARAM:
            allowed = self.params
        else:
            allowed = name in self.symbols
        if allowed:
            return None
        return f"'{name}' cannot be used in {self.title}", _fact(name, kind)

    def hints(self, name: str) -> tuple[str, ...]:
        """What to do with a name that cannot stand here."""
        if name in SCORES and "j" in self.symbols and "s" not in self.symbols:
            return ("to drop pairs by their score, write where(condition, s, -inf) in 'score'",)
        return (self.instead,) if self.instead else ()


def _fact(name: str, kind: SymbolKind | None) -> str:
    if kind is None:
        return f"'{name}' is a tensor, which is known when the op is called"
    if kind is SymbolKind.PARAM:
        return f"'{name}' is a param, which is known when the op is called"
    if kind is SymbolKind.SIZE:
        late = "known for each head dimension" if name in ("D", "Dv") else "known when the op is called"
        return f"'{name}' is a size, {late}"
    return f"'{name}' is {_MEANING[name]}; it stands in {_HOME[name]}"


_SIZES = frozenset(SIZES)
_PAIR = _SIZES | {"b", "h", "i", "j", "hkv"}

OF_BLOCKS = "blocks have 'I' and 'J'; what is of single pairs belongs into 'mask' or 'score'"
SCORE = Site("'score'", _PAIR | frozenset(SCORES), params=True, tensors=True)
MASK = Site("'mask'", _PAIR, params=True, tensors=True)
LAYOUT = Site("'layout'", _SIZES | {"b", "h", "hkv", "I", "J"}, params=True, tensors=True, instead=OF_BLOCKS)
SELECT = Site("'select'", _SIZES | {"b", "h", "i", "hkv"}, params=True, tensors=True)
WEIGHTS = Site("'weights'", _PAIR | {"s"}, params=True, tensors=True)
SINK = Site("a sink", _SIZES | {"b", "h", "i", "hkv"}, params=True, tensors=True)
SCALE = Site("'scale'", _SIZES, params=True, tensors=False, instead="a factor that varies belongs into 'score'")
DROPOUT = Site("'dropout'", frozenset(), params=True, tensors=False, instead="use a constant or a 'param'")
OWN_SIZE = (
    "shapes are made of B, H, Hkv, Nq, Nk, D, Dv and constants; for another length state 'const n = 8' (--set n=…)"
)
SHAPE = Site("a shape", _SIZES, params=False, tensors=False, instead="shapes are made of sizes and constants")
DEFAULT = Site("the default of a param", _SIZES, params=True, tensors=False)
LET = Site("'let'", _PAIR | frozenset(SCORES) | frozenset(BLOCKS), params=True, tensors=True)


def compile_time(title: str, instead: str = "") -> Site:
    """A place that takes constants only."""
    return Site(title, frozenset(), params=False, tensors=False, instead=instead, code="E209")


# What names stand for while an expression is resolved, and where its text is read ------------------------------------


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
