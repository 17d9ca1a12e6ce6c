"""What PyTorch's conversions mean in a mod, values that are made there, and what is asked of one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from flashgen.flex.numbers import Number
from flashgen.flex.places import refuse
from flashgen.flex.rules import Plain, Rule, Rules, ends
from flashgen.flex.stand_ins import Symbolic
from flashgen.flex.values import BOOL, NARROW, Session, Value, convert, scalar_of
from flashgen.ir.expr import Literal

RULES = Rules()


# -- types -------------------------------------------------------------------------------------------------------------

_HALVES = (torch.float16, torch.bfloat16)
_TYPES = frozenset((torch.bool, *NARROW, torch.int32, torch.int64, *_HALVES, torch.float32, torch.float64))
_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value in another of PyTorch's types."""
    if value.dtype is dtype:
        return value
    if dtype not in _TYPES:
        refuse("E603", f"a mod cannot convert to {dtype}")
    before, after = scalar_of(value.dtype), scalar_of(dtype)
    if dtype in _HALVES and before is not BOOL and not _is_exact(value, dtype):
        refuse(
            "E603",
            f"converting to {dtype} would round, and a mod is computed in 32 bits",
            hints=("leave the conversion out",),
        )
    if dtype in NARROW and not _fits(value, dtype):
        refuse("E603", f"converting to {dtype} would drop bits", hints=("convert to torch.int32",))
    return Value(convert(value.expr, after), dtype)


def _is_exact(value: Value, dtype: torch.dtype) -> bool:
    """Whether a float of 16 bits holds the operand: a constant, or a float of 8 bits."""
    if isinstance(value.expr, Literal):
        return torch.tensor(value.expr.value, dtype=dtype).item() == value.expr.value
    return value.dtype.is_floating_point and value.dtype.itemsize == 1


def _fits(value: Value, dtype: torch.dtype) -> bool:
    """Whether a type of ints has every value that the operand may have."""
    low, high = ends(dtype)
    if isinstance(value.expr, Literal):
        return low <= value.expr.value <= high
    if value.dtype.is_floating_point:
        return False
    least, most = ends(value.dtype)
    return low <= least and most <= high


def _kept(x: object, value: Value) -> Value | Plain:
    """What PyTorch gives back as the very operand where nothing changes: methods in place then change both."""
    is_same = isinstance(x, Symbolic) and x.held is value.dtype and x.expr is value.expr
    return Plain(x) if is_same else value


def _caster(dtype: torch.dtype) -> Rule:
    return lambda s, x, memory_format=None: _kept(x, cast(s.value(x), dtype))  # noqa: ARG005


for _name, _dtype in _CASTS.items():
    RULES[_name] = _caster(_dtype)


# Python's types where PyTorch expects its own.
_OF_PYTHON: Mapping[object, torch.dtype] = MappingProxyType(
    {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
)
_TENSOR_TYPE: type = type(torch.FloatTensor)
# What says where a value lies, or how: it changes nothing here.
_PLACEMENT = frozenset(
    ("device", "copy", "non_blocking", "layout", "memory_format", "pin_memory", "requires_grad", "names")
)


def _as_dtype(given: object) -> torch.dtype:
    """What PyTorch takes for a ``dtype``."""
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, type) and given in _OF_PYTHON:
        return _OF_PYTHON[given]
    return refuse("E603", f"{_shown(given)} is no type of numbers", hints=("give a torch.dtype: torch.float32",))


def _dtype_of(x: torch.Tensor) -> torch.dtype:
    return x.held if isinstance(x, Symbolic) else x.dtype


def _as_type(given: object) -> torch.dtype:
    """What PyTorch takes for the argument of ``Tensor.type``."""
    if isinstance(given, torch.dtype):
        return given
    if given is torch.Tensor or given == "torch.Tensor":
        return torch.get_default_dtype()
    # "torch.LongTensor", and "torch.cuda.LongTensor"
    named = getattr(torch, given.rpartition(".")[2], None) if isinstance(given, str) else given
    if isinstance(named, _TENSOR_TYPE):
        dtype: torch.dtype = named.dtype  # type: ignore[attr-defined]
        return dtype
    return refuse("E603", f"{_shown(given)} is no type of tensors", hints=("give a torch.dtype: torch.float32",))


def _shown(given: object) -> str:
    return f"'{given.__name__}'" if isinstance(given, type) else f"{given!r}"


def _check_placement(options: Mapping[str, object]) -> None:
    for name in options.keys() - _PLACEMENT:
        refuse("E602", f"a mod cannot pass '{name}' here")


@RULES.of("to")
def _converted(s: Session, x: object, *targets: object, dtype: object = None, **options: object) -> Value | Plain:
    """``x.to(dtype)``, ``x.to(other)``, ``x.to(device, dtype)``."""
    _check_placement(options)
    value = s.value(x)
    switches = [target for target in targets if isinstance(target, bool)]  # non_blocking, copy
    for place, target in enumerate(targets):
        if isinstance(target, torch.Tensor):
            value = cast(value, _dtype_of(target))
        elif target is not None and not _is_device(target) and not (place and isinstance(target, bool)):
            value = cast(value, _as_dtype(target))
    value = value if dtype is None else cast(value, _as_dtype(dtype))
    return value if options.get("copy") or switches[1:] == [True] else _kept(x, value)


@RULES.of("_to_copy")
def _copied(s: Session, x: object, *, dtype: object = None, **options: object) -> Value:
    return _made(s, x, dtype, s.value(x).dtype, options)


def _is_device(given: object) -> bool:
    if not isinstance(given, str):
        return isinstance(given, torch.device) or type(given) in (int, Number)
    try:
        torch.device(given)
    except RuntimeError:
        return False
    return True


@RULES.of("type")
def _typed(s: Session, x: object, dtype: object = None, non_blocking: bool = False) -> Value | Plain:  # noqa: ARG001
    if dtype is None:
        refuse("E602", "a mod cannot ask for the name of a type", hints=("ask for x.dtype",))
    return _kept(x, cast(s.value(x), _as_type(dtype)))


@RULES.of("type_as")
def _typed_as(s: Session, x: object, other: torch.Tensor) -> Value | Plain:
    return _kept(x, cast(s.value(x), _dtype_of(other)))


@RULES.of("clone", "__deepcopy__")
def _cloned(s: Session, x: object, *_: object, memory_format: object = None) -> Value:  # noqa: ARG001
    return s.value(x)


@RULES.of("contiguous", "__pos__", "positive", "alias")
def _itself(s: Session, x: object, *, memory_format: object = None) -> Value | Plain:  # noqa: ARG001
    return _kept(x, s.value(x))


@RULES.of("detach")
def _detached(s: Session, x: Symbolic) -> Value | Plain:
    s.check_detached(x, "detach")
    return _kept(x, s.value(x))


# -- values made anew --------------------------------------------------------------------------------------------------


def _alone(size: object) -> None:
    if isinstance(size, (tuple, list, torch.Size)) and len(size) == 0:
        return
    refuse("E603", "a mod makes numbers, not tensors with dimensions", hints=("give the size ()",))


def _made(s: Session, value: object, dtype: object, otherwise: torch.dtype, options: Mapping[str, object]) -> Value:
    _check_placement(options)
    made = s.value(value)
    return cast(made._replace(number=None), otherwise if dtype is None else _as_dtype(dtype))


@RULES.of("new_full")
def _new_full(
    s: Session, x: object, size: object, fill_value: object, *, dtype: object = None, **options: object
) -> Value:
    _alone(size)
    return _made(s, fill_value, dtype, s.value(x).dtype, options)


def _new(value: int) -> Rule:
    def rule(
        s: Session, x: object, *sizes: object, size: object = (), dtype: object = None, **options: object
    ) -> Value:
        for each in (*sizes, size):
            _alone(each)
        return _made(s, value, dtype, s.value(x).dtype, options)

    return rule


RULES["new_zeros"], RULES["new_ones"] = _new(0), _new(1)


@RULES.of("new_tensor")
def _new_tensor(s: Session, x: object, data: object, *, dtype: object = None, **options: object) -> Value:
    return _made(s, data, dtype, s.value(x).dtype, options)


@RULES.of("full_like")
def _full_like(s: Session, x: object, fill_value: object, *, dtype: object = None, **options: object) -> Value:
    return _made(s, fill_value, dtype, s.value(x).dtype, options)


def _like(value: int) -> Rule:
    return lambda s, x, *, dtype=None, **options: _made(s, value, dtype, s.value(x).dtype, options)


RULES["zeros_like"], RULES["ones_like"] = _like(0), _like(1)


@RULES.of("tensor", "scalar_tensor")
def _tensor(s: Session, data: object, *, dtype: object = None, **options: object) -> Value:
    return _made(s, data, dtype, s.value(data).dtype, options)


@RULES.of("as_tensor", "asarray")
def _as_tensor(s: Session, data: object, *, dtype: object = None, **options: object) -> Value | Plain:
    made = _made(s, data, dtype, s.value(data).dtype, options)
    return made if options.get("copy") else _kept(data, made)


@RULES.of("fill", "copy")
def _filled(s: Session, x: object, value: object, non_blocking: bool = False) -> Value:  # noqa: ARG001
    return _made(s, value, None, s.value(x).dtype, {})


@RULES.of("zero")
def _zeroed(s: Session, x: object) -> Value:
    return _made(s, 0, None, s.value(x).dtype, {})


@RULES.of("full")
def _full(s: Session, size: object, fill_value: object, *, dtype: object = None, **options: object) -> Value:
    _alone(size)
    return _made(s, fill_value, dtype, s.value(fill_value).dtype, options)


# -- what is asked of a value ------------------------------------------------------------------------------------------


RULES.update(
    {
        "get:dtype": lambda s, x: Plain(s.value(x).dtype),
        "get:device": lambda s, _: Plain(s.device),
        "get:is_cuda": lambda s, _: Plain(s.device.type == "cuda"),
        "get:is_cpu": lambda s, _: Plain(s.device.type == "cpu"),
        "get:shape": lambda *_: Plain(torch.Size(())),
        "get:ndim": lambda *_: Plain(0),
        "get:requires_grad": lambda *_: Plain(False),
        "get:layout": lambda *_: Plain(torch.strided),
        "dim": lambda *_: Plain(0),
        "numel": lambda *_: Plain(1),
        "size": lambda *_: Plain(torch.Size(())),
        "is_floating_point": lambda s, x: Plain(s.value(x).dtype.is_floating_point),
        "is_complex": lambda *_: Plain(False),
        "is_contiguous": lambda *_: Plain(True),
    }
)
