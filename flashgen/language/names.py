"""The names and signs that the language itself gives meaning to, and the places where each may stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.diagnostics import Span
from flashgen.ir.expr import Expr, Symbol, SymbolKind, literal
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import FORMS

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
