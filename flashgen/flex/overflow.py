"""Whether ints of a mod leave 32 bits at the lengths of a call: PyTorch's ints have 64 bits.

In: a ``Traced``, sizes, values of params. Out: an error, or nothing. Operators whose result may leave 32 bits are
evaluated exactly, others by the compiler's ranges. Ints that are read from tensors are taken to fit, together with what
is computed of them, until an operator bounds them (``%``, ``clamp``). Conversions of floats to ints saturate at 32
bits.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flashgen.analysis.ranging import plain_range
from flashgen.flex.ops import Bindings
from flashgen.flex.places import refuse_at
from flashgen.flex.specs import plain_names
from flashgen.flex.tracing import Mod, Traced
from flashgen.flex.values import BOOL, FLOAT, INT
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, walk
from flashgen.ir.interval import FULL_BOOL, FULL_FLOAT, FULL_INT, INT_MAX, INT_MIN, FloatRange, IntRange, Range
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType


def _power(x: int, n: int) -> int:
    if n < 0:
        n, x = n % 2, x if abs(x) == 1 else 0
    return int(x ** min(n, 64))


# The operators whose result may leave 32 bits.
_LEAVING: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "abs": abs,
        "shl": lambda x, n: x << min(n, 64) if n >= 0 else 0,
        "ipow": _power,
    }
)
# What may stand for a value of which nothing is known. A result that is the same for both does not hang on it.
_WIDE: Mapping[ScalarType, Range] = MappingProxyType({BOOL: FULL_BOOL, INT: FULL_INT, FLOAT: FULL_FLOAT})
_NEAR: Mapping[ScalarType, Range] = MappingProxyType(
    {BOOL: FULL_BOOL, INT: IntRange(-(2**15), 2**15), FLOAT: FloatRange(-1.0, 1.0, may_be_nan=True)}
)
_SIZE_OF: Mapping[str, str] = MappingProxyType({"b": "B", "h": "H", "i": "Nq", "j": "Nk"})
# Mods that stay inside up to here are not looked at again.
_ORDINARY = 2**18
_ORDINARY_SIZES: tuple[tuple[str, int], ...] = tuple((name, _ORDINARY) for name in _SIZE_OF.values())

# Of each param the ends of its value; None where it is a tensor's, or a float.
_Params = tuple[tuple[int, int] | None, ...]


def check(bound: Bindings, sizes: Mapping[str, int], mods: Sequence[Mod | None]) -> None:
    """Raise ``SpecError`` (E604) where an int of a mod does not fit in 32 bits."""
    traced = bound.trace.traced
    ints = [x if isinstance(x, int) else None for x in bound.params]
    is_ordinary = max(sizes.values()) <= _ORDINARY and all(x is None or abs(x) <= _ORDINARY for x in ints)
    if is_ordinary:
        ends = tuple([(-_ORDINARY, _ORDINARY) if each is INT else None for each in traced.params])
        if _leaving(traced, _ORDINARY_SIZES, ends) is None:
            return
    lengths = tuple((name, sizes[name]) for name in _SIZE_OF.values())
    found = _leaving(traced, lengths, tuple(None if x is None else (x, x) for x in ints))
    if found is None:
        return
    number, node, reached = found
    known = dict(zip(plain_names(traced), bound.trace.names, strict=True))
    shown = re.sub(r"\b[tp]\d+\b", lambda name: known[name[0]] or name[0], text(node))
    message = f"'{shown}' reaches {reached} at these lengths; ints of flashgen have 32 bits"
    refuse_at(mods[number], "E604", message, hints=("compute it with floats, or divide before you multiply",))


@functools.lru_cache(maxsize=1024)
def _leaving(traced: Traced, lengths: tuple[tuple[str, int], ...], params: _Params) -> tuple[int, Expr, int] | None:
    """The mod with an int that leaves 32 bits, the int, and its extreme value; None where all ints fit."""
    sizes = dict(lengths)
    for number, root in enumerate((traced.score, traced.mask)):
        known: dict[Expr, Range | None] = {}
        for node in _deciding(root):
            found = known[node] = _range(node, known, sizes, params)
            if isinstance(found, IntRange) and not INT_MIN <= found.lo <= found.hi <= INT_MAX:
                reached = found.lo if found.lo < INT_MIN else found.hi
                return number, node, reached
    return None


def _deciding(root: Expr | None) -> list[Expr]:
    """The ints of an expression, operands before operators, with the numbers that they are computed from."""
    nodes = [] if root is None else list(walk(root))
    wanted: set[Expr] = set()
    for node in reversed(nodes):
        if node.type is INT or node in wanted:
            wanted.add(node)
            wanted.update(arg for arg in node.children if arg.type is not BOOL)
    return [node for node in nodes if node in wanted]


def _range(
    node: Expr, known: Mapping[Expr, Range | None], sizes: Mapping[str, int], params: _Params
) -> IntRange | FloatRange | None:
    """The range of a number; None where it is not known."""
    found: Any
    match node:
        case Symbol(name=name, kind=SymbolKind.PARAM):
            ends = params[int(name[1:])]
            return None if ends is None else IntRange(*ends)
        case Symbol(name=name, kind=SymbolKind.INDEX):
            return IntRange(0, max(sizes[_SIZE_OF[name]] - 1, 0))
        case Apply(args=args):
            ranges = [known.get(arg) for arg in args]
            wide, near = (
                _applied(node, tuple(each or other[arg.type] for each, arg in zip(ranges, args, strict=True)))
                for other in (_WIDE, _NEAR)
            )
            found = wide if wide == near else None
        case _:
            found = plain_range(node, {}, None, tuple(_WIDE[each.type] for each in node.children))
    return None if found == _WIDE[node.type] else found


def _applied(node: Apply, ranges: tuple[Range, ...]) -> Range:
    exact = _LEAVING.get(node.op)
    if exact is None or node.type is not INT:
        found = plain_range(node, {}, None, ranges)
        stops = node.op == "to_int" and isinstance(found, IntRange) and (found.lo == INT_MIN or found.hi == INT_MAX)
        return FULL_INT if stops else found
    reached = [exact(*points) for points in itertools.product(*map(_points, ranges))]
    return IntRange(min(reached), max(reached))


def _points(x: Range) -> set[int]:
    """Arguments at which operators have their extremes: the ends of a range, the next ones of other parity, and 0."""
    assert isinstance(x, IntRange)
    return {n for n in (x.lo, x.lo + 1, 0, x.hi - 1, x.hi) if x.lo <= n <= x.hi}
