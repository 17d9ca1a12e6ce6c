"""The shapes that captured tensors are declared with.

A dimension that is as long as a size is that size where the index that reads it says so: then another length compiles
nothing. Every other is a constant, as of a table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from flashgen.flex.tracing import Traced
from flashgen.ir.build import apply, constant_value
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, index, index_set, literal, size, substitute, walk

Sizes = Mapping[str, int]
Extents = Sequence[Sequence[int]]
Shapes = tuple[tuple[Expr, ...], ...]

# The size that a position of its own counts to. Keys come first: ids of documents are read by both.
_ROLES = (("j", "Nk"), ("i", "Nq"), ("b", "B"), ("h", "H"))


def declared(traced: Traced, extents: Extents, sizes: Sizes | None) -> Shapes:
    """The declared shape of every captured tensor; without ``sizes`` only positions as indices tell sizes."""
    reads = _reads(traced)
    return tuple(
        tuple(_extent(reads.get((slot, axis), ()), length, sizes) for axis, length in enumerate(lengths))
        for slot, lengths in enumerate(extents)
    )


def fits(shapes: Shapes, extents: Extents, sizes: Sizes) -> bool:
    """Whether declared shapes agree with actual ones."""
    return all(
        tuple(_value_of(extent, sizes) for extent in shape) == tuple(lengths)
        for shape, lengths in zip(shapes, extents, strict=True)
    )


def _value_of(extent: Expr, sizes: Sizes) -> int:
    if isinstance(extent, Literal):
        return int(extent.value)
    values: dict[Expr, Expr] = {size(name): literal(value) for name, value in sizes.items()}
    found = constant_value(substitute(extent, values))
    assert found is not None, "shapes are made of sizes"
    return int(found)


@functools.lru_cache(maxsize=256)
def _reads(traced: Traced) -> Mapping[tuple[int, int], tuple[Expr, ...]]:
    """The indices that read each dimension of each captured tensor."""
    found: dict[tuple[int, int], tuple[Expr, ...]] = {}
    roots = [root for root in (traced.score, traced.mask) if root is not None]
    for node in walk(*roots):
        if isinstance(node, Load):
            for axis, each in enumerate(node.indices):
                place = (int(node.tensor[1:]), axis)
                found[place] = (*found.get(place, ()), each)
    return found


def _extent(reads: Sequence[Expr], length: int, sizes: Sizes | None) -> Expr:
    for candidate in _candidates(reads, guess=sizes is not None):
        if sizes is None or _value_of(candidate, sizes) == length:
            return candidate
    return literal(length)


def _candidates(reads: Sequence[Expr], *, guess: bool) -> Iterator[Expr]:
    for position, name in _ROLES:
        if index(position) in reads:
            yield size(name)
    if not guess:
        return
    for position, name in _ROLES:
        for each in reads:
            match each:
                case Apply(op="floordiv", args=(Symbol() as divided, Literal(value=step))) if divided == index(
                    position
                ):
                    yield apply("ceildiv", size(name), literal(step))
    found = frozenset[str]().union(*(index_set(each) for each in reads))
    for position, name in _ROLES:
        if position in found:
            yield size(name)
            yield apply("add", size(name), literal(1))
    if "h" in found:
        yield size("Hkv")
    if {"i", "j"} <= found:
        yield apply("sub", apply("add", size("Nq"), size("Nk")), literal(1))
        for name in ("Nk", "Nq"):
            twice = apply("mul", literal(2), size(name))
            yield from (apply("sub", twice, literal(1)), twice, apply("add", twice, literal(1)))
