"""Captured tensors as kernels see them by row and by column: the elements that rows read, instead of a box around them.

In: a mask, captured tensors, sizes and params of a call. Out: the mask and tensors in which an element that a row (a
column) reads by several indices, ``t[i, Nq - 1 - i]``, is an element of [B, H, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.analysis.levels import observed_loads
from flashgen.analysis.tiles import heads_of_key_head
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, index, index_set, substitute, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.operators_numpy import NUMPY
from flashgen.ir.types import ScalarType

_POSITION = {"i": "Nq", "j": "Nk"}


def by_position(
    keep: Expr, tensors: Mapping[str, Any], sizes: Mapping[str, int], params: Mapping[str, Any]
) -> tuple[Expr, Mapping[str, Any]]:
    """The mask and its tensors. Loads of tensors that are not given stay as they are."""
    found = dict(tensors)
    while True:
        wanted = next((each for loads in observed_loads(keep) for each in loads if _is_box(each, found)), None)
        if wanted is None:
            return keep, found
        (position,) = index_set(wanted) & set(_POSITION)
        name = f"{wanted.tensor} by {position}, {len(found)}"
        extents = (sizes["B"], sizes["H"], sizes[_POSITION[position]])
        found[name] = np.ascontiguousarray(np.broadcast_to(_values(wanted, position, found, sizes, params), extents))
        places = (index("b"), index("h"), index(position))
        keep = substitute(keep, {wanted: Load(wanted.type, tensor=name, indices=places)})


def _is_box(load: Load, tensors: Mapping[str, Any]) -> bool:
    """Whether several indices vary along the position, and no load inside of an index is such an element."""
    inside = [each for each in walk(*load.indices) if isinstance(each, Load)]
    if any(each.tensor not in tensors for each in (load, *inside)) or any(_is_box(each, tensors) for each in inside):
        return False
    return sum(bool(index_set(each) & set(_POSITION)) for each in load.indices) > 1


def _values(
    load: Load, position: str, tensors: Mapping[str, Any], sizes: Mapping[str, int], params: Mapping[str, Any]
) -> Any:
    """The elements that all positions read, for each b and h; [B or 1, H or 1, N or 1]."""
    heads = np.arange(sizes["H"])[:, None]
    symbols = {"b": np.arange(sizes["B"])[:, None, None], "h": heads, "hkv": heads // heads_of_key_head(sizes)}
    symbols[position] = np.arange(sizes[_POSITION[position]])
    done: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in walk(load):
            match node:
                case Literal(value=value):
                    array = np.asarray(value)
                    done[node] = NUMPY.to_float(array) if node.type is ScalarType.FLOAT else array
                case Symbol(kind=SymbolKind.INDEX, name=name):
                    done[node] = symbols[name]
                case Symbol(kind=SymbolKind.PARAM, name=name):
                    done[node] = np.asarray(params[name])
                case Symbol(name=name):
                    done[node] = np.asarray(sizes[name])
                case Load(tensor=name, indices=indices):
                    array = tensors[name] if tensors[name].size else np.zeros([1] * len(indices), tensors[name].dtype)
                    # Of an int the lower 32 bits, held in 64 as all ints are here.
                    array = array.astype(np.int32).astype(np.int64) if array.dtype.kind == "i" else array
                    places = zip(indices, array.shape, strict=True)
                    done[node] = array[tuple(np.clip(done[place], 0, extent - 1) for place, extent in places)]
                case Apply(op=op, args=args):
                    done[node] = OPERATORS[op].meaning(NUMPY, *(done[arg] for arg in args))
                case _:
                    raise AssertionError(f"no value for {node}")
    return done[load]
