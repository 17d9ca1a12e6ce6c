"""What kind of tensors a call holds: plain ones, whose memory kernels read, or wrapped, traced and distributed ones.

In: the tensors of a call. Out: whether they are plain; tensors with memory of their own for lazily negated, conjugated
and zero ones; errors for tensors that an op does not take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
