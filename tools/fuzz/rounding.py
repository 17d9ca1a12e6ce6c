"""The reference as some float32 program would compute it: every operation with errors of a few units in the last place.

In: a function over float64 tensors. Out: what it gives with such errors. It tells a wrong kernel from an input at which
float32 itself has no answer: a comparison within rounding of its border, a difference in which everything cancels. It
is asked only where a result is beyond its tolerance, and loosens none: what no such program comes near stays wrong.

Errors enter below autograd, in forward and backward alike: relative to results, and for sums and products of matrices
relative to what is added up. Numbers that every precision holds (small whole ones) stay as they are, and so does what
only selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.ir.operators import OPERATORS, Library

# Of float32: four roundings to nearest.
UNIT = 2.0**-22
_FUNCTIONS = tuple(row.meaning.torch[0] for row in OPERATORS.values() if isinstance(row.meaning, Library))
_ROUNDING = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "reciprocal", "remainder", "pow", "sum", "mm", "bmm", "addmm", "baddbmm"),
        *_FUNCTIONS,
        *(f"{name}_backward" for name in _FUNCTIONS),
    }
)
_PRODUCTS = frozenset({"mm", "bmm"})
_EXPONENTIALS = frozenset({"exp", "exp2", "sigmoid", "softplus"})
_RANGED = _EXPONENTIALS | {"mul", "div", "reciprocal", "pow"}
_WHOLE = 2.0**24


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, float64 results have the errors of float32, and operands of products those of ``operands``.

    ``operands`` is the relative error of the type in which a matrix unit takes them, 0 where that is float32.
    """

    def __init__(self, seed: int, operands: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self._operands = operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and self._operands:
            args = tuple(self._noisy(x, x.abs(), self._operands) for x in args)
        out = func(*args, **(kwargs or {}))
        if name not in _ROUNDING or not isinstance(out, Tensor) or not out.is_floating_point() or out.is_meta:
            return out  # of tangents that PyTorch knows to be zero it asks for shapes alone, on 'meta'
        if name in _PRODUCTS:
            size = func(*(x.abs() for x in args))
        elif name == "sum":
            size = func(args[0].abs(), *args[1:], **(kwargs or {}))
        else:
            size = out.abs()
        return self._noisy(out, size, UNIT)

    def _noisy(self, x: Tensor, size: Tensor, unit: float) -> Tensor:
        error = (2 * torch.rand(x.shape, generator=self._generator, dtype=x.dtype) - 1) * size * unit
        exact = ((x == x.round()) & (x.abs() < _WHOLE)) | ~x.isfinite()
        return torch.where(exact, x, x + error)


class OutOfRange(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, ``happened`` says whether a result of finite operands was too small or too large to hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _RANGED and isinstance(out, Tensor) and out.is_floating_point():
            lost = (out == 0) | out.isinf()
            for x in args:
                if isinstance(x, Tensor):
                    # Nothing is lost of 0 but where it is an exponent.
                    lost = lost & x.isfinite() & ((x != 0) | (name in _EXPONENTIALS))
            self.happened |= bool(lost.any())
        return out
