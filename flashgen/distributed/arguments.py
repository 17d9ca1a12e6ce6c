"""The arguments of one rank: q, k and v are checked, brought into the form of a dense call, and described in words.

In: the arguments of a call. Out: tensors, and texts that ranks compare. Errors are ``TypeError`` and ``ValueError``
that name the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.op.op import AttentionOp
from flashgen.op.registration import rows_of_region
from flashgen.op.tensor_kinds import check_tensors, has_distributed


def autocast(op: AttentionOp, *tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the type of the autocast region, if there is one and the op takes that type."""
    first: object = tensors[0]
    if not isinstance(first, Tensor):
        return tensors
    kind = first.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return rows_of_region(op.engine, kind, tensors)


def check_call(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, backend: str) -> None:
    """Raise ``TypeError`` and ``ValueError`` for tensors that a dense call on a group of this backend does not take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_one(name, x, q, backend)
    _check_together(q, k, v)
    if HeadDim(q.shape[3], v.shape[3]) not in spec.head_dims:
        known = " or ".join(map(str, spec.head_dims))
        raise ValueError(
            f"head dimension {q.shape[3]} of q and {v.shape[3]} of v; '{spec.name}' is compiled for {known}"
        )


def refuse_distributed(given: Mapping[str, object]) -> None:
    """Raise ``TypeError`` for DTensors among the arguments of a call."""
    for name, x in given.items():
        if has_distributed([x]):
            what = "this rank's rows (to_local())" if name in ("q", "k", "v") else "the whole (full_tensor())"
            raise TypeError(f"'{name}' is a DTensor; context_parallel takes {what}")


def _check_one(name: str, x: Tensor, q: Tensor, backend: str) -> None:
    _check_rows(name, x)
    if is_functorch_wrapped_tensor(x):
        raise TypeError(
            f"'{name}' is a tensor of torch.func (vmap, grad, jvp): context_parallel has no rule for these, as ranks "
            "talk in it; the op itself has"
        )
    if x.dim() != 4:
        raise ValueError(f"'{name}' has shape {list(x.shape)}; [B, H, n, D] is expected, n rows of this rank")
    if backend == "nccl" and not x.is_cuda:
        raise ValueError(f"'{name}' is on {x.device}; NCCL, which this group has, takes tensors on GPUs")
    if backend == "gloo" and not x.is_cpu and x.device == q.device:
        raise ValueError(f"'{name}' is on {x.device}; gloo, which this group has, takes tensors on CPUs")
    if x.device != q.device:
        raise ValueError(f"'{name}' is on {x.device}, but 'q' is on {q.device}")
    if x.dtype is not q.dtype:
        raise TypeError(f"'{name}' is {x.dtype}, but 'q' is {q.dtype}; q, k and v share one type")


def _check_rows(name: str, x: object) -> None:
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError(
            f"'{name}' is a NestedTensor; context_parallel takes this rank's rows of all sequences, one behind the "
            "other: .varlen(q, k, v, cu_seqlens)"
        )
    check_tensors([name], [x])


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q, k and v have the shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(
            f"q, k and v have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} rows; a rank holds the same positions of each"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{shapes}; B is one for all, Hkv for k and v")
    if q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"{shapes}; H must be a multiple of Hkv")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}; q and k share their head dimension")


def described(x: Tensor, flag: bool) -> str:
    """A tensor's shape without its number of rows, dtype and device; ``flag``: gradients are recorded."""
    sizes = ", ".join("n" if axis == 2 else str(extent) for axis, extent in enumerate(x.shape))
    return f"[{sizes}] {x.dtype} on {x.device.type}{' with gradient' if flag and x.requires_grad else ''}"


def worded(value: object, flag: bool) -> str:
    """A number as text; a tensor as its shape and dtype."""
    if isinstance(value, Tensor) and value.dim():
        gradient = " with gradient" if flag and value.requires_grad else ""
        return f"{list(value.shape)} {value.dtype}{gradient}"
    return str(value.item()) if isinstance(value, Tensor) else repr(value)


def dense(op: AttentionOp, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """q, k and v [n, H, D] of a ragged batch in the layout of a dense call, [1, H, n, D]."""
    for name, x in zip("qkv", rows, strict=True):
        _check_rows(name, x)
        if x.dim() != 3:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; [n, H, D] is expected, n rows of this rank")
    return autocast(op, *(x.transpose(0, 1)[None] for x in rows))
