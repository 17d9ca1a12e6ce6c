"""Jagged NestedTensors as ragged batches.

In: q [B, H, j, D], k and v [B, Hkv, j, width] of the layout ``torch.jagged``, whose dimension 2 is ragged. Out: rows of
all sequences, [T, H, width], and where each begins; and results as NestedTensors with the offsets of q.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def is_nested(q: object, k: object, v: object) -> bool:
    """Whether any of the three is a NestedTensor; plain calls ask, so that it has to be quick."""
    return (
        getattr(q, "is_nested", False) is True
        or getattr(k, "is_nested", False) is True
        or getattr(v, "is_nested", False) is True
    )


def nested(found: Any, offsets: Tensor) -> Any:
    """What varlen returns, o [Tq, H, Dv] or that and lse [H, Tq], as NestedTensors [B, H, j, Dv] and [B, H, j]."""
    o = found[0] if isinstance(found, tuple) else found
    make: Any = functools.partial(torch.nested.nested_tensor_from_jagged, offsets=offsets, jagged_dim=2)
    rows = make(o.transpose(0, 1))
    return (rows, make(found[1])) if isinstance(found, tuple) else rows


def sequences(
    q: Tensor, k: Tensor, v: Tensor, places: tuple[object, ...]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The rows of NestedTensors, and where sequences of queries and of keys begin: what varlen takes.

    ``places`` are q_start, kv_start, q_total and kv_total, none of which may be given. Raises ``TypeError`` and
    ``ValueError``.
    """
    if places != (0, 0, None, None):
        raise ValueError(
            "q_start, kv_start, q_total and kv_total place a part of a sequence; NestedTensors hold whole ones"
        )
    (q_rows, q_offsets), (k_rows, k_offsets), (v_rows, v_offsets) = (
        _rows(name, x) for name, x in (("q", q), ("k", k), ("v", v))
    )
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"'q' has {q_offsets.shape[0] - 1} sequences and 'k' has {k_offsets.shape[0] - 1}")
    _check_same(k_offsets, v_offsets)
    return (q_rows, k_rows, v_rows), (q_offsets, k_offsets)


def _rows(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, H, width] of a NestedTensor, and its offsets [B + 1]. Raises ``TypeError`` and ``ValueError``."""
    form = f"a jagged NestedTensor [B, {'H' if name == 'q' else 'Hkv'}, j, {'Dv' if name == 'v' else 'D'}]"
    if not x.is_nested:
        raise TypeError(f"'{name}' is no NestedTensor, but others of q, k and v are; {form} is expected")
    if x.layout is not torch.jagged:
        raise TypeError(
            f"'{name}' is a NestedTensor of layout {x.layout}; {form} is expected: make it with layout=torch.jagged"
        )
    nested: Any = x
    if nested.dim() != 4 or nested._ragged_idx != 2:
        sizes = ", ".join(
            "j" if axis == nested._ragged_idx else str(nested.shape[axis]) for axis in range(nested.dim())
        )
        raise ValueError(
            f"'{name}' is a NestedTensor [{sizes}]; {form} is expected: of [B, j, H, width] pass {name}.transpose(1, 2)"
        )
    if nested.lengths() is not None:
        raise ValueError(
            f"'{name}' is a NestedTensor with gaps between its sequences, a view of another; pass "
            f"{name}.contiguous(), or the rows and their cumulative lengths to varlen"
        )
    return nested.values().transpose(0, 1), nested.offsets()


def _check_same(k: Tensor, v: Tensor) -> None:
    """Raise ``ValueError`` where k and v are cut into other sequences."""
    if k is v or torch.compiler.is_compiling():
        return
    if k.shape != v.shape or not torch.equal(k, v):
        raise ValueError("'v' is a NestedTensor of other lengths than 'k'; each key has one value")
