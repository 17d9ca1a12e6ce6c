"""Which dimensions of captured tensors lie along the axes of a call, by what a spec reads.

In: a spec, the shapes of a call, the axes that a mesh shards. Out: dimensions of which a rank reads its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, literal, rewrite, size, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor
from flashgen.ir.types import ScalarType

# The axes that a mesh may shard, and the indices of the language that run along them.
INDICES: Mapping[str, tuple[str, ...]] = {"b": ("b",), "h": ("h", "hkv"), "i": ("i",)}
SIZES: Mapping[str, str] = {"b": "B", "h": "H", "hkv": "Hkv", "i": "Nq"}


def indexed(spec: AttentionSpec, tensor: CapturedTensor) -> dict[int, str]:
    """Of a captured tensor the dimensions that every load indexes by an index of the language alone, and its name."""
    loads = [node for node in walk(*_roots(spec)) if isinstance(node, Load) and node.tensor == tensor.name]
    return {
        dim: name
        for dim, extent in enumerate(tensor.shape)
        for name, letters in SIZES.items()
        if extent == size(letters) and all(_is_index(load.indices[dim], name) for load in loads)
    }


def sharded_dims(
    names: Mapping[int, str],
    x: Any,
    extents: Mapping[str, int],
    along: Sequence[str | None],
    whole: set[str],
    *,
    shares_heads: bool,
) -> dict[int, str]:
    """The dimensions of a captured tensor that a rank holds its own part of, with their axes.

    ``names`` are those of ``indexed``; ``shares_heads``: ranks share key/value heads.
    """
    if not isinstance(x, DTensor):
        return {}
    found: dict[int, str] = {}
    for placement, axis in zip(x.placements, along, strict=True):
        dim: int | None = getattr(placement, "dim", None)
        name = names.get(-1 if dim is None else dim)
        if dim is None or name is None or axis not in whole or name not in INDICES[axis or ""]:
            continue
        if x.shape[dim] == extents[name] and not (name == "hkv" and shares_heads) and axis not in found.values():
            found[dim] = axis or ""
    return found


def is_told_by_tensors_alone(spec: AttentionSpec, axis: str) -> bool:
    """Whether an axis means nothing but which part of captured tensors is read: no random bits, no arithmetic."""
    if spec.dropout is not None:
        return False
    names = INDICES[axis]
    letters = {SIZES[name] for name in names}
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}

    def without_parts(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        pairs = zip(node.indices, shapes[node.tensor], strict=True)
        is_part = [any(_is_index(x, name) and extent == size(SIZES[name]) for name in names) for x, extent in pairs]
        return replace(node, indices=tuple(literal(0) if n else x for n, x in zip(is_part, node.indices, strict=True)))

    own = {size(each) for each in letters}
    extents = [extent for shape in shapes.values() for extent in shape if extent not in own]
    defaults = [param.default for param in spec.params if param.default is not None]
    read = [rewrite(root, without_parts) for root in _roots(spec)]
    return not _mentions((*read, *extents, *defaults), set(names), letters)


def _roots(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Everything that a spec evaluates for a pair or a row; a list is read where its first number stands."""
    select = spec.select
    lists = (
        () if select is None else (Load(ScalarType.INT, tensor=select.tensor, indices=(*select.indices, literal(0))),)
    )
    return (*spec.expressions, *(() if spec.dropout is None else (spec.dropout,)), *lists)


def _mentions(roots: Iterable[Expr], indices: set[str], letters: set[str]) -> bool:
    names = {SymbolKind.INDEX: indices, SymbolKind.SIZE: letters}
    return any(isinstance(node, Symbol) and node.name in names.get(node.kind, ()) for node in walk(*roots))


def _is_index(expr: Expr, name: str) -> bool:
    return isinstance(expr, Symbol) and expr.kind is SymbolKind.INDEX and expr.name == name
