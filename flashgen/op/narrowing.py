"""Captured tensors of 64 bits as the 32 that kernels read, without a number that means something else afterwards.

In: what a call captures; of which tensors only differences or comparisons count (``analysis/captured.py``). Out: the
same with int32, int64 within 32 bits, or float32 in the place of wider tensors. An order is kept by ranks, differences
by taking the same off all numbers; what is still too wide is refused by name. On the CPU values decide; nobody waits
for those of a GPU, where what was made of a tensor is kept while nothing is written to it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor

from flashgen.analysis.captured import Scale, Use, scales
from flashgen.ir.spec import AttentionSpec
from flashgen.op.conversion import converted, is_integral, require, unwrapped
from flashgen.op.signature import TORCH_DTYPES
from flashgen.op.tensor_kinds import UnchangedTensor

_WIDE_INTS = frozenset((torch.int64, torch.uint64, torch.uint32))
_WIDE = _WIDE_INTS | {torch.float64}
_I32 = torch.iinfo(torch.int32)
_NEAR = 2.0**-18  # how far a float32 may be from the number that it stands for: half of the last bit of 64 to 128
_COUNTLESS = 2.0**64  # numbers from here on stand for infinity, and no step between them means anything
_MOST_KEPT = 16
_Kept = tuple[list[UnchangedTensor], list[Tensor]]


class Narrowing:
    """Narrows what calls of one spec capture."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._scales = scales(spec)
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()

    def narrowed(self, given: Sequence[Any], *, is_exact: bool = False) -> Sequence[Any]:
        """The values with 64-bit tensors converted to 32 bits without a change of meaning.

        ``is_exact``: float64 tensors stay float64. ``given`` are captured tensors, then params.
        Raises ``ValueError`` by name.
        """
        found = given
        for scale in self._scales:
            tensors = [given[n] for n in scale.tensors]
            if any(isinstance(x, Tensor) and x.dtype in _WIDE for x in tensors):
                made = self._made(scale, tensors, is_exact=is_exact)
                found = [made.get(n, x) for n, x in enumerate(found)]
        return found

    def _made(self, scale: Scale, given: Sequence[Any], *, is_exact: bool) -> dict[int, Tensor]:
        is_float = self._spec.tensors[scale.tensors[0]].element.is_floating
        numbers = {n: x for n, x in zip(scale.tensors, given, strict=True) if x is not None}
        tensors, declared = list(numbers.values()), [self._spec.tensors[n] for n in numbers]
        alike = all(
            isinstance(x, Tensor)
            and (x.is_floating_point() if is_float else is_integral(x.dtype))
            and not x.is_meta
            and x.layout is torch.strided
            for x in tensors
        )
        if not alike or (is_float and is_exact):  # others are refused by name elsewhere
            return {}
        made = self._find(tensors)
        if made is None:
            wide = [
                x.double() if is_float else converted(x, torch.int64, f"tensor '{each.name}'", str(each.element))
                for x, each in zip(tensors, declared, strict=True)
            ]
            names = [each.name for each in declared]
            narrow = (_Floats(scale.use, names) if is_float else _Ints(scale.use, names)).of(wide)
            made = [x.to(TORCH_DTYPES[each.element]) for x, each in zip(narrow, declared, strict=True)]
            self._keep(tensors, made)
        return dict(zip(numbers, made, strict=True))

    def _find(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        known = self._kept.get(tuple(map(id, tensors))) if _is_kept(tensors) else None
        return known[1] if known is not None and known[0] == [UnchangedTensor(x) for x in tensors] else None

    def _keep(self, tensors: Sequence[Tensor], made: list[Tensor]) -> None:
        if _is_kept(tensors):
            self._kept[tuple(map(id, tensors))] = ([UnchangedTensor(x) for x in tensors], made)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)


def _is_kept(tensors: Sequence[Tensor]) -> bool:
    """Whether what is made of tensors holds for later calls: on GPUs, outside of graphs, where none has a gradient."""
    if _in_graph(tensors) or any(not x.is_cuda or x.requires_grad or x.is_inference() for x in tensors):
        return False
    return not torch.cuda.is_current_stream_capturing()


def _in_graph(tensors: Sequence[Tensor]) -> bool:
    """Whether nobody may look at values, as there are none yet."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return True
    return any(isinstance(x, FakeTensor) for x in tensors)


@dataclass(frozen=True)
class _Numbers:
    """Tensors of one scale: what of them counts, and their names. Subclasses say what the narrow type holds.

    ``most``: as many elements have each a number of the narrow type.
    """

    use: Use
    names: Sequence[str]
    most: ClassVar[int]

    def of(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors of 64 bits that mean the same and lose nothing in 32. Raises ``ValueError`` for what is too wide."""
        seen = [x.detach() if torch.compiler.is_compiling() else unwrapped(x).detach() for x in tensors if x.numel()]
        if not seen:
            return tensors
        in_graph = _in_graph(seen)
        if not in_graph and all(x.is_cpu for x in seen) and bool(self.fit(seen)):
            return tensors
        if self.use is Use.ORDER and not in_graph and sum(x.numel() for x in seen) <= self.most:
            return _ranks(tensors)
        made, moved = tensors, seen
        if self.use < Use.VALUE:
            offset = self._offset(seen)
            made, moved = ([x - offset for x in each] for each in (tensors, seen))
        first, *others = self.names
        beside = "".join(f", which meets '{name}'," for name in others)
        otherwise = f"tensor '{first}'{beside} {self.refusal}".replace("NAME", first)
        require(self.fit(moved), otherwise)
        return made

    def fit(self, seen: Sequence[Tensor]) -> Tensor:
        """Whether the narrow type holds what counts of these numbers."""
        raise NotImplementedError

    @property
    def refusal(self) -> str:
        """What is said of numbers that do not fit; NAME stands for a tensor's."""
        raise NotImplementedError

    def _offset(self, seen: Sequence[Tensor]) -> Tensor:
        """What is taken off all numbers: 0 where they need nothing."""
        low, _ = _ends([x.nan_to_num(math.inf, math.inf, math.inf) for x in seen])
        _, high = _ends([x.nan_to_num(-math.inf, -math.inf, -math.inf) for x in seen])
        middle = low // 2 + high // 2  # their sum might leave 64 bits
        return torch.where(self.fit(seen) | ~middle.isfinite(), torch.zeros_like(middle), middle)


class _Ints(_Numbers):
    most = _I32.max

    def fit(self, seen: Sequence[Tensor]) -> Tensor:
        low, high = _ends(seen)
        inside = (low >= _I32.min) & (high <= _I32.max)
        return inside & (high // 2 - low // 2 < 2**30) if self.use is Use.DIFFERENCE else inside

    @property
    def refusal(self) -> str:
        if self.use is Use.VALUE:
            return (
                "has 64 bits and holds numbers beyond i32, which ints of kernels are; take an offset off before the "
                "call, NAME - NAME.min(), or number what is only compared: torch.unique(NAME, return_inverse=True)[1]"
            )
        return (
            "has 64 bits and holds numbers 2**31 and more apart, whose differences are beyond i32, which ints of "
            "kernels are; divide them before the call, or number what is only compared: "
            "torch.unique(NAME, return_inverse=True)[1]"
        )


class _Floats(_Numbers):
    most = 2**24

    @property
    def _near(self) -> float:
        return 0.0 if self.use is Use.ORDER else _NEAR

    def fit(self, seen: Sequence[Tensor]) -> Tensor:
        return torch.stack([_is_held(x, self._near) for x in seen]).all()

    @property
    def refusal(self) -> str:
        return (
            "is torch.float64 and holds numbers beyond f32, which kernels read: some are more than "
            f"{self._near:.2g} from the nearest; where that will do, pass NAME.float() or (NAME - NAME.min()).float()"
        )


def _ends(seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack([x.amin() for x in seen]).amin(), torch.stack([x.amax() for x in seen]).amax()


def _is_held(x: Tensor, near: float) -> Tensor:
    """Whether float32 holds all numbers: to so much, and those that stand for infinity as finite ones."""
    narrow = x.float()
    close = ((narrow.double() - x).abs() <= near) | ((x.abs() >= _COUNTLESS) & narrow.isfinite())
    return (close | ~x.isfinite()).all()


def _ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Whole numbers in the order of the elements of all tensors, the same for equal ones; NaN stays."""
    flat = torch.cat([x.detach().reshape(-1) for x in tensors])
    values, places = flat.sort()
    steps = torch.cat([places.new_zeros(1), (values[1:] != values[:-1]).cumsum(0)])
    ranks = steps.gather(0, places.argsort()).to(flat.dtype)
    if flat.is_floating_point():
        ranks = torch.where(flat.isnan(), flat, ranks)
    parts = torch.split(ranks, [math.prod(x.shape) for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
