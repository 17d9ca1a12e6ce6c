"""By what a captured tensor matters: by its numbers, by their differences, or by their order alone.

Stage: analyse. In: an ``AttentionSpec``. Out: ``Scale``s: captured tensors on one scale, and the way in which their
values matter. Kernels read 32 bits. Where only differences matter, a call may subtract one offset from every number
before it narrows them (time stamps); where only comparisons matter, it may replace numbers by ranks (hashes, ids).
``batch_axes`` says along which axis each runs with the batch: ``torch.vmap`` folds mapped dimensions into it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Apply, Expr, Literal, Load, index, size, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType, ScalarType


class Use(IntEnum):
    """The way in which values matter; each value of the enum includes the ones before."""

    ORDER = 0
    DIFFERENCE = 1
    VALUE = 2


@dataclass(frozen=True)
class Scale:
    """Captured tensors, by their indices in the spec, whose values are compared or subtracted."""

    tensors: tuple[int, ...]
    use: Use


def scales(spec: AttentionSpec) -> tuple[Scale, ...]:
    """The scales of all captured tensors of numbers that formulas read, one for tensors that meet each other.

    The lists of ``select`` are read in 64 bits.
    """
    roots = list(spec.expressions) + ([] if spec.select is None else list(spec.select.indices))
    nodes = list(walk(*roots))
    read = {node.tensor for node in nodes if isinstance(node, Load)}
    kinds = {each.name: each.element.scalar for each in spec.tensors if each.element in _WIDEST and each.name in read}
    found = _Uses(dict.fromkeys(kinds, Use.ORDER), {name: {name} for name in kinds}, kinds)
    for node in nodes:
        found.sums[node] = found.of(node)
    found.settle(*roots)
    if spec.select is not None and spec.select.tensor in kinds:
        found.uses[spec.select.tensor] = Use.VALUE
    numbers = {each.name: number for number, each in enumerate(spec.tensors)}
    together = {id(found.together[name]): found.together[name] for name in kinds}
    return tuple(
        Scale(tuple(sorted(numbers[name] for name in names)), max(found.uses[name] for name in names))
        for names in together.values()
    )


# Types beside which kernels read none that is wider; a spec that declares 16 bits asks for rounding.
_WIDEST = frozenset((ElementType.I32, ElementType.I64, ElementType.F32))


@dataclass(frozen=True)
class _TensorSum:
    """How an expression changes when all numbers of tensors grow by one; ``is_element``: it is one of those numbers."""

    terms: Mapping[str, int | float]
    is_element: bool = False

    def plus(self, other: _TensorSum, factor: float = 1) -> _TensorSum:
        """The sum with another one, multiplied by a factor."""
        total = dict(self.terms)
        for name, count in other.terms.items():
            total[name] = total.get(name, 0) + factor * count
        return _TensorSum(total)


_NONE = _TensorSum({})


@dataclass
class _Uses:
    """The ``uses`` of each tensor, the tensors on its scale (``together``), and the ``sums`` of nodes."""

    uses: dict[str, Use]
    together: dict[str, set[str]]
    kinds: Mapping[str, ScalarType]
    sums: dict[Expr, _TensorSum] = field(default_factory=dict)

    def settle(self, *nodes: Expr) -> None:
        """Record that the values of these nodes matter."""
        for node in nodes:
            self._meet(self.sums[node], Use.DIFFERENCE)

    def of(self, node: Expr) -> _TensorSum:
        """The sum of a node whose children are in ``sums``; uses of these are recorded."""
        own = [self.sums[child] for child in node.children]
        match node:
            case Load(tensor=name):
                self.settle(*node.children)
                return _TensorSum({name: 1}, is_element=True) if name in self.uses else _NONE
            case Apply(op="add" | "sub" as op):
                return own[0].plus(own[1], 1 if op == "add" else -1)
            case Apply(op="neg"):
                return _NONE.plus(own[0], -1)
            case Apply(op="mul", args=(Literal(value=factor), _) | (_, Literal(value=factor))):
                return _NONE.plus(own[0].plus(own[1]), factor)
            case Apply(op="div", args=(_, Literal(value=divisor))) if divisor:
                return _NONE.plus(own[0], 1 / divisor)
            case Apply(op="where" | "min" | "max"):
                _, x, y = (_NONE, *own)[-3:]
                self._meeting(x, y)
                return _TensorSum(x.terms, x.is_element and y.is_element)
            case Apply(op=op) if OPERATORS[op].flipped:
                self._meeting(*own)
            case _:
                self.settle(*node.children)
        return _NONE

    def _meeting(self, x: _TensorSum, y: _TensorSum) -> None:
        self._meet(x.plus(y, -1), Use.ORDER if x.is_element and y.is_element else Use.DIFFERENCE)

    def _meet(self, total: _TensorSum, use: Use) -> None:
        """Record how the tensors of a total matter: as ``use`` says if a common offset cancels, else by numbers."""
        met = [name for name, count in total.terms.items() if count]
        stays = sum(total.terms.values()) == 0 and len({self.kinds[name] for name in met}) <= 1
        whole = set[str]().union(*(self.together[name] for name in met))
        self.together |= dict.fromkeys(whole, whole)
        for name, count in total.terms.items():
            self.uses[name] = max(self.uses[name], use if stays or not count else Use.VALUE)


_B, _b = size("B"), index("b")


@functools.lru_cache(maxsize=64)
def batch_axes(spec: AttentionSpec) -> Mapping[str, int | None] | None:
    """The axis of each captured tensor that runs along the batch, None for a tensor without one. None for all where an
    entry's result depends on its number or on the size of the batch.

    Dropout, which depends on the number of an entry, is not considered: a call may drop nothing.
    """
    roots = [simplify(each) for each in spec.expressions]
    axes: dict[str, int | None] = {}
    for tensor in spec.tensors:
        along = [axis for axis, extent in enumerate(tensor.shape) if _B in set(walk(extent))]
        if len(along) > 1 or any(tensor.shape[axis] != _B for axis in along):
            return None
        axes[tensor.name] = along[0] if along else None
    defaults = [param.default for param in spec.params if param.default is not None]
    if any(_B in set(walk(root)) for root in (*defaults, *roots)):
        return None
    for node in walk(*roots):
        own = axes[node.tensor] if isinstance(node, Load) else None
        if own is not None and isinstance(node, Load) and node.indices[own] != _b:
            return None
        if _b in (child for n, child in enumerate(node.children) if n != own):
            return None
    return axes
