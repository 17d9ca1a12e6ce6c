"""What a caller passes, as the operator takes it.

In: a captured tensor, a param, a seed, a drop probability, offsets, as people write them. Out: tensors of the declared
types, ints. Whole numbers stay whole, real numbers real: a tensor of ids may come as int64 where i32 is declared, a
table as bfloat16 where f32 is, and its gradient goes back in the type that it came in. What the declared type cannot
hold is refused by name; where values cannot be looked at without waiting for them (on a GPU, in a compiled graph)
PyTorch's ``_assert_async`` does so when they are there.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from flashgen.ir.spec import CapturedTensor, HeadDim, Param
from flashgen.ir.types import ScalarType
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.op.signature import TORCH_DTYPES, describe_tensor, dtype_of, kind

# q_start, kv_start, b_start, h_start, and the totals of the same.
Offsets = tuple[int, int, int, int, int | None, int | None, int | None, int | None]
_I32, _F32 = torch.iinfo(torch.int32), torch.finfo(torch.float32)
_MOST_F32 = _F32.max


def tensor_argument(declared: CapturedTensor, value: object, *, is_exact: bool = False) -> Tensor:
    """A captured tensor in its declared type; ``is_exact``: real numbers keep their own.

    Raises ``TypeError``, and ``ValueError`` for values that the declared type cannot hold.
    """
    if not isinstance(value, Tensor):
        form = describe_tensor(declared)
        if value is None:
            raise TypeError(f"missing argument '{declared.name}': the spec declares tensor {declared.name}: {form}")
        raise TypeError(f"argument '{declared.name}' must be a tensor ({form} in the spec), not {type(value).__name__}")
    what = f"tensor '{declared.name}'"
    return converted(value, TORCH_DTYPES[declared.element], what, str(declared.element), is_exact=is_exact)


def param_argument(param: Param, value: object, device: torch.device, *, is_exact: bool = False) -> Tensor | None:
    """A param as a 0-dim tensor, so that another value compiles nothing anew; None for its default.

    Raises ``TypeError``, and ``ValueError`` for a value that does not fit.
    """
    dtype = dtype_of(param)
    if value is None:
        if param.default is None:
            raise TypeError(f"missing argument '{param.name}': the spec declares param {param.name}: {kind(param)}")
        return None
    if isinstance(value, Tensor):
        what = f"param '{param.name}'"
        check_scalar(value, what, device)
        return converted(value, dtype, what, kind(param), is_exact=is_exact)
    is_int = param.type is ScalarType.INT
    number = value if type(value) is float and not is_int else as_number(value, whole=is_int)
    if number is None:
        raise TypeError(
            f"argument '{param.name}' must be a number or a 0-dim tensor ({kind(param)} in the spec), "
            f"not {type(value).__name__}"
        )
    if is_int and not _I32.min <= number <= _I32.max:
        raise ValueError(f"argument '{param.name}' is {number}; an i32 lies in [-2**31, 2**31)")
    return as_scalar(number if is_int or isinstance(number, torch.SymFloat) else as_float(param.name, number), dtype)


def as_float(name: str, number: Any) -> float:
    """A number as float32 takes it: infinite only where it was."""
    if type(number) is float and -_MOST_F32 <= number <= _MOST_F32:
        return number
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    # From half a unit behind the largest float32 on numbers are rounded to infinity.
    if _F32.max + 2.0**103 <= abs(value) and not (math.isinf(value) and value == number):
        raise ValueError(f"argument '{name}' is {number}; an f32 holds nothing beyond ±{_F32.max:.8g}")
    return value


def seed_argument(seed: object, device: torch.device) -> Tensor:
    """The seed as a 0-dim int64 tensor, modulo 2**64; None draws it, so that the state of torch's generator governs it.

    On a GPU it is drawn there: nothing waits for it, and a captured graph draws another one at each replay.
    Raises ``TypeError`` for what is no whole number and ``ValueError`` for more than one, or one on another device.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if not isinstance(seed, Tensor):
        number = as_number(seed, whole=True)
        if number is None:
            raise TypeError(f"'seed' must be an int or a 0-dim tensor of integers, not {type(seed).__name__}")
        return as_scalar((number + 2**63) % 2**64 - 2**63, torch.int64)
    if not is_integral(seed.dtype):
        raise TypeError(f"'seed' is {seed.dtype}; it must be an int or a 0-dim tensor of integers")
    check_scalar(seed, "'seed'", device)
    return seed if seed.dtype is torch.int64 else seed.to(torch.int64)  # of uint64, too, modulo 2**64


def probability_argument(dropout_p: object, device: torch.device) -> Tensor | None:
    """The drop probability as a 0-dim tensor; None for the spec's. Raises ``TypeError`` and ``ValueError``."""
    if dropout_p is None:
        return None
    if not isinstance(dropout_p, Tensor):
        number = as_number(dropout_p, whole=False)
        if number is None:
            raise TypeError(f"'dropout_p' must be a number or a 0-dim tensor, not {type(dropout_p).__name__}")
        return as_scalar(number, torch.float64)
    if not (dropout_p.is_floating_point() or is_integral(dropout_p.dtype)):
        raise TypeError(f"'dropout_p' is {dropout_p.dtype}; it must be a number or a 0-dim tensor of one")
    check_scalar(dropout_p, "'dropout_p'", device)
    if dropout_p.requires_grad and torch.is_grad_enabled():
        raise ValueError("'dropout_p' requires a gradient, which a drop probability does not have; pass it detached")
    return dropout_p


def offset_arguments(offsets: tuple[object, ...], kind: Kind = DENSE) -> Any:
    """The numbers of a kind of calls as ints. Raises ``TypeError`` where one is something else."""
    optional = kind.may_be_none
    return tuple(
        [
            value if type(value) is int or (value is None and name in optional) else int_argument(name, value)
            for name, value in zip(kind.numbers, offsets, strict=True)
        ]
    )


def int_argument(name: str, value: object) -> Any:
    """An int, NumPy's and symbolic ones too. Raises ``TypeError`` by name."""
    number = as_number(value, whole=True)
    if number is None:
        hint = "; pass int(…) of it" if isinstance(value, Tensor) else ""
        raise TypeError(f"'{name}' must be an int, not {type(value).__name__}{hint}")
    return number


def head_dim_argument(given: object) -> HeadDim | None:
    """A head dimension, given as an int or as two, (D, Dv); None for what is neither."""
    both = given if isinstance(given, (tuple, list)) else (given, given)
    found = [as_number(each, whole=True) for each in both]
    return None if len(found) != 2 or None in found else HeadDim(*found)


def splits_argument(given: object) -> Any:
    """The number of parts that keys are split into, of 32 bits. Raises ``ValueError``."""
    splits = given if type(given) is int else as_number(given, whole=True)
    if splits is None or splits < 0:
        raise ValueError(f"'num_splits' is {given!r}; 0 or the number of parts that keys are split into is expected")
    return saturated_number(splits)  # there are no more than tiles of keys


def check_switch(name: str, value: object) -> None:
    """Raise ``TypeError`` for what is no bool."""
    if value is not True and value is not False:
        raise TypeError(f"'{name}' must be a bool or None, not {type(value).__name__}")


def as_number(value: object, *, whole: bool) -> Any:
    """A number as it is, symbolic ones included, NumPy's ints as Python's; None for what is none, such as a bool."""
    if type(value) is int or (not whole and type(value) is float):
        return value
    if isinstance(value, torch.SymInt) or (not whole and isinstance(value, torch.SymFloat)):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return value if not whole and isinstance(value, numbers.Real) else None


def as_scalar(value: object, dtype: torch.dtype) -> Tensor:
    """A Python number as a 0-dim tensor on the CPU, whatever torch's default device is."""
    if torch.compiler.is_compiling():
        # The compiler keeps a number symbolic that meets a tensor in arithmetic, and specialises on any
        # other.
        return torch.zeros((), dtype=dtype, device="cpu") + value  # type: ignore[operator]
    return torch.scalar_tensor(value, dtype=dtype, device="cpu")  # type: ignore[arg-type]


def check_scalar(x: Tensor, what: str, device: torch.device) -> None:
    """Raise ``ValueError`` where a tensor is more than a number, or neither on the CPU nor on the device of q."""
    if x.dim() != 0:
        raise ValueError(f"{what} has shape {list(x.shape)}; a 0-dim tensor is expected")
    if x.device != device and x.device.type != "cpu":
        raise ValueError(f"{what} is on {x.device}; the CPU or the device of q ({device}) is expected")


def check_device(what: str, x: Tensor, device: torch.device) -> None:
    """Raise ``ValueError`` where a tensor lies elsewhere than q."""
    if x.device != device:
        raise ValueError(f"{what} is on {x.device}, but 'q' is on {device}")


def converted(x: Tensor, wanted: torch.dtype, what: str, declared: str, *, is_exact: bool = False) -> Tensor:
    """A tensor in the type that the spec declares; its gradient goes back in its own.

    Raises ``TypeError`` between whole numbers, real numbers and bools, ``ValueError`` for values that do not fit.
    """
    if x.dtype is wanted:
        return x
    if not ((wanted.is_floating_point and x.dtype.is_floating_point) or (is_integral(wanted) and is_integral(x.dtype))):
        takes = "bool" if wanted is torch.bool else "floating" if wanted.is_floating_point else "integer"
        raise TypeError(f"{what} is {x.dtype}; the spec declares {declared} ({wanted}), which takes {takes} tensors")
    base = x if torch.compiler.is_compiling() else unwrapped(x)
    if not (_holds_all(wanted, x.dtype) or x.is_meta or x.layout is not torch.strided or base.numel() == 0):
        require(
            _fits(base.detach(), wanted),
            f"{what} is {x.dtype} and holds numbers beyond {declared} ({wanted}), which the spec declares",
        )  # fmt: skip
    return x if is_exact and wanted.is_floating_point else x.to(wanted)


def unwrapped(x: Tensor) -> Tensor:
    """The numbers behind the wrappers of torch.func."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def require(holds: Tensor, otherwise: str) -> None:
    """Raise ``ValueError`` where a condition does not hold; later, and a ``RuntimeError``, where nobody waits."""
    if holds.is_cpu and not torch.compiler.is_compiling() and not _len_torch_dispatch_stack():
        if not holds.item():
            raise ValueError(otherwise)
    else:
        torch._assert_async(holds, otherwise)


_INTEGERS = frozenset((
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
))  # fmt: skip


def is_integral(dtype: torch.dtype) -> bool:
    """Whether a type holds whole numbers; bools are none."""
    return dtype in _INTEGERS


def saturated(x: Tensor) -> Tensor:
    """Whole numbers as int32, the nearest where they have more bits: what is too large for a tensor stays so."""
    if x.dtype in (torch.int64, torch.uint64, torch.uint32):  # of uint64 those from 2**63 on are negative
        x = x.to(torch.int64).clamp(_I32.min, _I32.max)
    return x if x.dtype is torch.int32 else x.to(torch.int32)


def saturated_number(number: Any) -> Any:
    """One number as int32 holds it; symbolic ones stay as they are."""
    return max(min(number, _I32.max), _I32.min) if type(number) is int else number


# Made at once: torch.compile traces what a call reads, and no cache.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LIMITS: dict[torch.dtype, tuple[float, float]] = {
    **{each: (torch.iinfo(each).min, torch.iinfo(each).max) for each in _INTEGERS},
    **{each: (torch.finfo(each).min, torch.finfo(each).max) for each in _FLOATS},
}


def _holds_all(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Whether every finite number of one type is, rounded, a finite one of another."""
    low, high = _LIMITS[wanted]
    least, most = _LIMITS.get(given, (0.0, 0.0))  # small floats of 8 bits and fewer
    return low <= least and most <= high


def _fits(x: Tensor, wanted: torch.dtype) -> Tensor:
    if wanted.is_floating_point:
        return (x.to(wanted).isfinite() | ~x.isfinite()).all()
    limits = torch.iinfo(wanted)
    if x.dtype is torch.uint64:  # PyTorch compares none; as int64 those from 2**63 on are negative
        return ((x.to(torch.int64) >= 0) & (x.to(torch.int64) <= limits.max)).all()
    wide = x.to(torch.int64)
    return ((wide >= limits.min) & (wide <= limits.max)).all()
