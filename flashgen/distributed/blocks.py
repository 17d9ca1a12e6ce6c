"""What a mask keeps, in blocks of queries and keys: how much work positions are, and which keys they need.

In: a spec, sizes, captured tensors, spans of positions. Out: NumPy arrays. Host only; the same on every rank that has
the same captured tensors.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashgen.analysis.boxes import EMPTY, FULL, Boxes, classify_boxes
from flashgen.analysis.tiles import loads_of
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import Load, Symbol, SymbolKind, index_set, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.plan.tile_counts import known_params

Span = tuple[int, int]  # positions, the second is behind the last

MOST_BLOCKS = 256  # of keys, so that a look at a mask takes milliseconds
MOST_ROWS = 8  # parts of a span of queries that are looked at
_MOST_HEADS = 64  # pairs of b and h; where masks have more, nothing is known of b and h beyond these


@dataclass(frozen=True)
class Mask:
    """A mask of one call: sizes B, H, Hkv, Nq and Nk of the whole, and the values of what it reads."""

    variant: Variant
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    tensors: Mapping[str, NDArray[np.generic]]

    @property
    def key(self) -> str:
        """Equal for equal masks."""
        digest = hashlib.sha256(
            repr((self.variant.keep, sorted(self.sizes.items()), sorted(self.params.items()))).encode()
        )
        for name, array in sorted(self.tensors.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def mask_of(spec: AttentionSpec, head_dim: HeadDim, sizes: Mapping[str, int], captured: Mapping[str, object]) -> Mask:
    """The mask of a call. What it reads of tensors on a device is copied to the host."""
    variant = _variant(spec, head_dim)
    nodes = set(walk(variant.keep))
    reads = {node.tensor for node in nodes if isinstance(node, Load)}
    names = {node.name for node in nodes if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM}
    tensors: dict[str, NDArray[np.generic]] = {}
    for name in reads:
        given = captured.get(name)
        if not isinstance(given, Tensor):
            came = "it was not given" if name not in captured else f"{type(given).__name__} came"
            raise TypeError(f"the mask of '{spec.name}' reads the tensor '{name}': {came}")
        values = given.detach().cpu()
        tensors[name] = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
    shape = Shape(sizes["B"], sizes["H"], sizes["Hkv"], sizes["Nq"], sizes["Nk"])
    params = {name: value for name, value in known_params(spec.params, shape).items() if name in names}
    for name in names:
        value = captured.get(name)
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            params[name] = value
    return Mask(variant, sizes, params, tensors)


@functools.lru_cache(maxsize=64)
def _variant(spec: AttentionSpec, head_dim: HeadDim) -> Variant:
    return analyse(spec, head_dim)


def cuts(start: int, stop: int, parts: int) -> list[Span]:
    """``parts`` spans of nearly equal length, fewer where there are fewer positions."""
    length = stop - start
    parts = max(min(parts, length), 1)
    ends = [start + length * n // parts for n in range(parts + 1)]
    return list(itertools.pairwise(ends))


def kept(mask: Mask, queries: Sequence[Span], keys: Sequence[Span]) -> NDArray[np.float64]:
    """The share of the pairs that is kept, [queries, keys]: 0 where none is, 1 where all are, else a half.

    The mean over b and h; 0 only where it is 0 for each of them.
    """
    if not queries or not keys:
        return np.zeros((len(queries), len(keys)))
    axes = index_set(mask.variant.keep)
    batches = range(mask.sizes["B"]) if "b" in axes else range(1)
    heads = range(mask.sizes["H"]) if {"h", "hkv"} & axes else range(1)
    pairs = [(b, h) for b in batches for h in heads]
    if len(pairs) > _MOST_HEADS:
        return np.full((len(queries), len(keys)), 0.5)
    q, k = np.array(queries, np.int64), np.array(keys, np.int64)
    rows, columns = (each.ravel() for each in np.meshgrid(np.arange(len(q)), np.arange(len(k)), indexing="ij"))
    some = (q[rows, 1] > q[rows, 0]) & (k[columns, 1] > k[columns, 0])
    total = np.zeros(len(rows))
    for b, h in pairs:
        boxes = Boxes(
            b=np.full(len(rows), b),
            h=np.full(len(rows), h),
            first_i=q[rows, 0],
            last_i=np.maximum(q[rows, 1] - 1, q[rows, 0]),
            first_j=k[columns, 0],
            last_j=np.maximum(k[columns, 1] - 1, k[columns, 0]),
            sizes=mask.sizes,
            params=mask.params,
        )
        classes = classify_boxes(mask.variant.keep, boxes, loads_of(mask.tensors))
        total += np.where(classes == EMPTY, 0.0, np.where(classes == FULL, 1.0, 0.5))
    return np.where(some, total / len(pairs), 0.0).reshape(len(q), len(k))
