"""What kind of tensors a call holds: plain ones, whose memory kernels read, or wrapped, traced and distributed ones;
and where tensors lie: strides of results, addresses and strides as arguments of a kernel; the type of their sums.

In: the tensors of a call. Out: whether they are plain; tensors with memory of their own for lazily negated, conjugated
and zero ones; errors for tensors that an op does not take.

Results have no gaps, and their rows lie in the order of those of q, k or v: projections are [B, N, H, D] in memory, and
so is what is projected next: o.transpose(1, 2).reshape(B, N, -1) copies nothing, nor do gradients of q, k and v.
That follows from shapes and strides alone, so that fake tensors have it, too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flashgen.hosts.kernel import Kernel, Values
from flashgen.kinds.operand import AXES, HEAD_ROWS, stride_of

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class NoMemoryError(RuntimeError):
    """A tensor that looks plain has no memory to read: it is on 'meta', or a zero tensor of PyTorch's."""


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether no mode of PyTorch watches, traces, casts or transforms these tensors, and none is negated lazily.

    Tensors without memory look plain, too (those that torch.func has left behind, sparse ones, those on 'meta'): to
    ask for their address is a ``RuntimeError``.
    """
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _is_any_autocast_enabled()
        or _profiler_enabled()
        or _is_tracing()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator would take half of the time
        if x is not None and (type(x) not in _PLAIN or x.is_neg()):
            return False
    return True


def have_memory(tensors: Sequence[Any]) -> bool:
    """Whether tensors that look plain have memory. To ask before each call would cost a tenth of a small call."""
    return all(x is None or _has_memory(x) for x in tensors)


def lies_in_memory(tensors: Sequence[Any]) -> bool:
    """Whether all of these tensors are plain ones with memory, and no operation on them is traced."""
    return get_proxy_mode() is None and all(x is None or (type(x) in _PLAIN and _has_memory(x)) for x in tensors)


def _has_memory(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
        return False
    return not (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x) or x.is_meta or x._is_zerotensor())


def has_distributed(tensors: Sequence[Any]) -> bool:
    """Whether some tensors are DTensors, asked without importing their class."""
    return any(type(x).__name__ == "DTensor" for x in tensors)


def refuse_distributed(who: str, tensors: Sequence[Any]) -> None:
    """Raise ``TypeError`` where some tensors are DTensors; ``who`` is what does not take them, for the message."""
    if has_distributed(tensors):
        raise TypeError(
            f"{who} take no DTensors: pass what each rank has (to_local()), with h_start and h_total, or b_start and "
            "b_total"
        )


def transforming() -> bool:
    """Whether a transform of torch.func is active: then autograd functions are called above the dispatcher."""
    return not is_compiling() and _are_functorch_transforms_active()


def with_memory(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors, with copies in place of lazily negated, conjugated or zero ones."""
    return tuple(_with_memory(x) if isinstance(x, Tensor) else x for x in tensors)


def _with_memory(x: Tensor) -> Tensor:
    if x._is_zerotensor():
        return x.clone()
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """The values of tensors on any device as arrays on the host, for analysis; narrower floats become float32."""
    held = {name: with_memory((x.detach().cpu(),))[0] for name, x in tensors.items()}
    return {name: (x.float() if x.is_floating_point() and x.itemsize < 4 else x).numpy() for name, x in held.items()}


def check_tensors(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise ``TypeError`` where q, k or v is no tensor, or any tensor of the call is nested or not dense.

    ``names`` are those of the ``tensors``, q, k and v first.
    """
    count = min(len(names), len(tensors))  # Dynamo before PyTorch 2.7 zips what is of one length
    for name, x in zip(names[:count], tensors[:count], strict=True):
        if isinstance(x, Tensor):
            _check_dense(name, x)
        elif name in ("q", "k", "v"):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")


def _check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(
            f"'{name}' is a nested tensor, which an op does not take here: q, k and v may be NestedTensors, all "
            "three, of layout=torch.jagged; captured tensors are padded to the longest sequence"
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"'{name}' has layout {x.layout}; a dense tensor (torch.strided) is expected: pass {name}.to_dense()"
        )


# A shape and its strides. PyTorch makes a tensor faster from both than from a shape.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def packed_layout(*shape: int) -> Layout:
    """A shape and the strides of a contiguous tensor."""
    return shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def layout_like(x: Tensor, shape: Sequence[int]) -> Layout:
    """Where rows of a shape lie in the order of those of ``x``; contiguous where some of these lie in one place."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return packed_layout(*shape)
    inner_first = sorted(range(len(shape) - 2, -1, -1), key=lambda axis: strides[axis])
    found, step = [1] * len(shape), shape[-1]
    for axis in inner_first:
        found[axis], step = step, step * shape[axis]
    return tuple(shape), tuple(found)


@overload
def laid(x: Tensor, layout: Layout) -> Tensor: ...
@overload
def laid(x: Tensor | None, layout: Layout) -> Tensor | None: ...
def laid(x: Tensor | None, layout: Layout) -> Tensor | None:
    """A tensor that lies so: itself, or a copy. None is left alone."""
    if x is None or x.stride() == layout[1]:
        return x
    return torch.empty_strided(*layout, dtype=x.dtype, device=x.device).copy_(x)


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """The type in which elements of a type are added up."""
    return torch.promote_types(dtype, torch.float32)


def packed(x: Tensor | None) -> Tensor | None:
    """A tensor without gaps."""
    return None if x is None else x.contiguous()


def copied_to(found: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> Any:
    """Copy results to the tensors where they are wanted, and return these."""
    for x, place in zip(found, into, strict=True):
        if x is not None and place is not None:
            place.copy_(x)
    return into


def address(x: Tensor | None) -> int:
    """The address of a tensor; 0, a null pointer, for None."""
    return 0 if x is None else x.data_ptr()


def with_strides(kernel: Kernel, fixed: Values, rows: Mapping[str, Sequence[int]]) -> Values:
    """The fixed values of a call with other strides of b, h and n for these operands."""
    layout, values = kernel.layout, list(fixed)
    for name, strides in rows.items():
        for axis, stride in zip(AXES, strides, strict=False):
            values[layout.slots[stride_of(name, axis)] - layout.varying] = stride
    return values


def by_axis(strides: Sequence[int]) -> Sequence[int]:
    """Strides of b, h and n of [B, H, N, width], or of [T, H, width], where T are the rows of all sequences."""
    return strides if len(strides) == 4 else (0, strides[1], strides[0])


def places_of(rows: Sequence[Tensor | None]) -> tuple[tuple[int, ...], ...]:
    """The strides of each tensor; an empty tuple for None."""
    return tuple(() if x is None else x.stride() for x in rows)


def in_slices(kernel: Kernel, fixed: Values, rows: Mapping[str, Tensor | None], lse: Tensor | None) -> Values:
    """The fixed values of a call whose results are slices of larger tensors."""
    strides = {name: x.stride() for name, x in rows.items() if x is not None}
    values = list(with_strides(kernel, fixed, strides))
    if lse is not None:
        values[kernel.layout.slots[HEAD_ROWS] - kernel.layout.varying] = lse.stride(1)
    return values


class UnchangedTensor:
    """A tensor as it is now: equal to another record of the same tensor if nothing was written in between.

    PyTorch counts writes, but not those to tensors of inference mode.
    """

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = weakref.ref(x), x._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnchangedTensor):
            return NotImplemented
        x = self._tensor()
        return x is not None and x is other._tensor() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]
