"""Evaluates expressions in tests, over any array namespace, with loads and symbols given by structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.ir.expr import Apply, Expr, Literal, Load, walk
from flashgen.ir.operators import NUMPY, OPERATORS, ArrayNamespace
from flashgen.ir.types import ScalarType


def evaluate(
    expr: Expr, values: Mapping[Expr, Any], xp: ArrayNamespace = NUMPY, tensors: Mapping[str, Any] | None = None
) -> Any:
    """The value of ``expr``; ``values`` holds arrays for symbols (or other nodes), ``tensors`` what loads read.

    An empty tensor reads as zero, an int as its lower 32 bits.
    """
    done: dict[Expr, Any] = dict(values)
    with np.errstate(all="ignore"):
        for node in walk(expr):
            if node in done:
                continue
            match node:
                case Literal(value=value):
                    array = np.asarray(value)
                    done[node] = xp.to_float(array) if node.type is ScalarType.FLOAT else array
                case Load(tensor=name, indices=indices):
                    assert tensors is not None
                    array = tensors[name] if tensors[name].size else np.zeros([1] * len(indices), tensors[name].dtype)
                    array = array.astype(np.int32) if array.dtype == np.int64 else array
                    places = zip(indices, array.shape, strict=True)
                    done[node] = array[tuple(np.clip(done[place], 0, extent - 1) for place, extent in places)]
                case Apply(op=op, args=args):
                    done[node] = OPERATORS[op].meaning(xp, *(done[arg] for arg in args))
                case _:
                    raise AssertionError(f"no value for {node}")
    return done[expr]
