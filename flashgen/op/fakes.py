"""What the operators give for fake tensors: shapes, types and devices, which ``torch.compile`` and exports ask for.

In: a ``Signature`` and an operator's arguments, of which numbers are not there. Out: empty tensors. Raises
``ValueError`` where tensors cannot go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashgen.op.conversion import check_device
from flashgen.op.signature import Signature
from flashgen.op.values import layout_like

# Before 2.7 PyTorch does not tell an export from other compilations.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", is_compiling)


def fake_forward(
    signature: Signature, exported: Callable[[], None] | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Any:
    """o, or o, lse and its parts, without numbers; ``exported`` is called where a program is exported."""
    if exported is not None and _is_exporting():
        exported()
    kind = signature.kind
    if not q.dim() == k.dim() == v.dim() == kind.dims:
        raise ValueError(f"q, k and v have {kind.dims} dimensions")
    # One tensor on meta among real ones comes here, too.
    captured = [(f"tensor '{declared.name}'", x) for declared, x in zip(signature.tensors, others, strict=False)]
    for name, tensor in (("'k'", k), ("'v'", v), *captured):
        check_device(name, tensor, q.device)
    end = signature.tensor_arguments - 3
    scalars, own = others[len(signature.tensors) : end - len(kind.tensors)], others[end - len(kind.tensors) : end]
    numbers = [("a param, 'seed' or 'dropout_p'", x) for x in scalars]
    numbers += [(f"'{name}'", x) for name, x in zip(kind.tensors, own, strict=True)]
    for name, x in numbers:
        if x is not None and x.is_meta and not q.is_meta:
            raise ValueError(f"{name} is on meta, but 'q' is on {q.device}")
    o = q.new_empty_strided(*layout_like(q, (*q.shape[:-1], v.shape[-1])), dtype=signature.o or q.dtype)
    if not signature.has_lse:
        return o
    rows = kind.rows(q)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return o, lse, q.new_empty((*rows, 2), dtype=torch.float32)


def fake_backward(signature: Signature, *args: Any) -> list[Tensor]:
    """The gradients that are needed, without numbers."""
    start = 5 if signature.has_lse else 1
    inputs: Sequence[Any] = args[start : start + signature.inputs]
    rows, captured = inputs[:3], inputs[3:]
    found = [x.new_empty_strided(*layout_like(x, x.shape)) for x, need in zip(rows, args[-1], strict=False) if need]
    return found + [x.new_empty(x.shape) for x, need in zip(captured, args[-1][3:], strict=True) if need]
