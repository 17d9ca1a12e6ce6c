"""PyTorch's dtypes in the IR: the type of the IR for each, and conversions that lose nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flashgen.flex.places import refuse
from flashgen.flex.values import BOOL, FLOAT, INT, NARROW, Value, convert, scalar_of
from flashgen.ir.expr import Expr, Literal

_HALVES = (torch.float16, torch.bfloat16)
_TYPES = frozenset((torch.bool, *NARROW, torch.int32, torch.int64, *_HALVES, torch.float32, torch.float64))
ORDER = {BOOL: 0, INT: 1, FLOAT: 2}  # of promotion


def promoted(*values: Value) -> torch.dtype:
    """The type in which values are compared, by PyTorch's rules for tensors and Python numbers."""
    top = max((scalar_of(value.dtype) for value in values), key=ORDER.__getitem__)
    found: torch.dtype | None = None
    for value in values:
        if not value.weak and scalar_of(value.dtype) is top:
            found = value.dtype if found is None else torch.promote_types(found, value.dtype)
    if found is not None:
        return found
    return {BOOL: torch.bool, INT: torch.int64, FLOAT: torch.get_default_dtype()}[top]


def common(dtype: torch.dtype, *operands: Value, wraps: bool = True) -> tuple[Expr, ...]:
    """The operands converted to the type of a result. ``wraps``: the result may leave the range of the type."""
    if dtype in NARROW:
        if wraps:
            _refuse_wrapping(f"arithmetic in {dtype}", dtype)
        for each in operands:
            _check_fits(each, dtype)
    return tuple(convert(each.expr, scalar_of(dtype)) for each in operands)


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _check_fits(operand: Value, dtype: torch.dtype) -> None:
    """A Python number has to fit the type of the other operands. If captured, the trace holds for numbers that fit."""
    low, high = _ends(dtype)
    given: Any = operand.number
    if given is not None and not low <= given <= high:
        _refuse_wrapping(f"{given} as {dtype}", dtype)


def _refuse_wrapping(what: str, dtype: torch.dtype) -> NoReturn:
    refuse(
        "E603",
        f"{what} wraps at the ends of that type, {_ends(dtype)[0]} and {_ends(dtype)[1]}, which kernels do not do",
        hints=("convert what is read first: t[h, kv_idx].int()",),
    )


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value in another of PyTorch's types."""
    if value.dtype is dtype and not value.weak:
        return value
    if dtype not in _TYPES:
        refuse("E603", f"a mod cannot convert to {dtype}")
    if dtype in _HALVES and scalar_of(value.dtype) is not BOOL and not _is_exact(value, dtype):
        refuse(
            "E603",
            f"converting to {dtype} would round, and a mod is computed in 32 bits",
            hints=("leave the conversion out",),
        )
    if dtype in NARROW and not _fits(value, dtype):
        refuse("E603", f"converting to {dtype} would drop bits", hints=("convert to torch.int32",))
    return Value(convert(value.expr, scalar_of(dtype)), dtype)


def _is_exact(value: Value, dtype: torch.dtype) -> bool:
    """Whether a 16-bit float holds the operand exactly: a constant, or an 8-bit float."""
    if isinstance(value.expr, Literal):
        return torch.tensor(value.expr.value, dtype=dtype).item() == value.expr.value
    return value.dtype.is_floating_point and value.dtype.itemsize == 1


def _fits(value: Value, dtype: torch.dtype) -> bool:
    """Whether an integer type holds every value that the operand may have."""
    low, high = _ends(dtype)
    if isinstance(value.expr, Literal):
        return low <= value.expr.value <= high
    if value.dtype.is_floating_point:
        return False
    least, most = _ends(value.dtype)
    return low <= least and most <= high
