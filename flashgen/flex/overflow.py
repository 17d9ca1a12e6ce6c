"""Whether ints of a mod leave 32 bits at the lengths of a call: PyTorch's have 64.

In: a ``Traced``, sizes, values of params. Exact ranges of sums and products of positions; what is read from tensors is
taken to fit, with whatever is computed of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from flashgen.flex.places import place_of, raise_at
from flashgen.flex.tracing import Mod, Traced
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, walk
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType

_LIMIT = 2**31
Range = tuple[int, int]
_EXACT: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "shl": lambda x, n: x << max(0, min(n, 64)),
    "ipow": lambda x, n: x ** max(0, min(n, 64)),
    "min": min,
    "max": max,
}


@functools.lru_cache(maxsize=256)
def is_at_risk(traced: Traced) -> bool:
    """Whether any length could make a difference: products of positions, powers, shifts, large constants."""
    for node in walk(*(root for root in (traced.score, traced.mask) if root is not None)):
        if isinstance(node, Apply) and node.type is ScalarType.INT:
            literals = [arg.value for arg in node.args if isinstance(arg, Literal)]
            grows = node.op in ("shl", "ipow") or (node.op == "mul" and not literals)
            if grows or any(abs(value) >= 2**8 for value in literals if node.op == "mul"):
                return True
            if any(abs(value) >= 2**28 for value in literals):
                return True
    return False


def check(
    traced: Traced, sizes: Mapping[str, int], params: Sequence[int | float | Tensor], mods: Sequence[Mod | None]
) -> None:
    """Raise ``SpecError`` (E604) where an int of a mod does not fit in 32 bits."""
    for root, mod in zip((traced.score, traced.mask), mods, strict=True):
        if root is None:
            continue
        known: dict[Expr, Range | None] = {}
        for node in walk(root):
            if node.type is not ScalarType.INT:
                continue
            found = known[node] = _range(node, known, sizes, params)
            if found is not None and not (found[0] >= -_LIMIT and found[1] < _LIMIT):
                reached = found[0] if found[0] < -_LIMIT else found[1]
                message = f"'{text(node)}' reaches {reached} at these lengths; ints of flashgen have 32 bits"
                raise_at(
                    place_of(mod), "E604", message, hints=("compute it with floats, or divide before you multiply",)
                )


def _range(
    node: Expr, known: Mapping[Expr, Range | None], sizes: Mapping[str, int], params: Sequence[int | float | Tensor]
) -> Range | None:
    match node:
        case Literal(value=value):
            return int(value), int(value)
        case Symbol(name=name, kind=SymbolKind.PARAM):
            given = params[int(name[1:])]
            return (given, given) if isinstance(given, int) else None
        case Symbol(name=name, kind=SymbolKind.INDEX):
            count = sizes[{"b": "B", "h": "H", "i": "Nq", "j": "Nk"}[name]]
            return 0, max(count - 1, 0)
        case Apply(op=op, args=args) if op in _EXACT:
            ranges = [known.get(arg) for arg in args]
            if any(each is None for each in ranges):
                return None
            ends = [_EXACT[op](*corner) for corner in itertools.product(*(each for each in ranges if each))]
            return min(ends), max(ends)
    return None
