"""Whether a call is one like the last ones, so that what follows from it need not be found again.

In: the tensors of a call, the names of those that its mask reads. Out: a ``Mark``, equal for calls of the same shapes
that read the same. A tensor on a device is known by itself and by PyTorch's count of what was written to it: to compare
what it holds, the host would have to wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashgen.op.same import Same

Mark = tuple[object, ...]


def mark_of(tensors: Sequence[Any], names: Sequence[str], reads: frozenset[str]) -> Mark | None:
    """Of q, k, v and what is captured under ``names``, of which a mask ``reads`` some; None: nothing is known of it."""
    found: list[object] = [_form(x) for x in tensors[:3]]
    for name, x in zip(names, tensors[3:], strict=False):
        if not isinstance(x, Tensor) or name not in reads:
            found.append(_form(x))
        elif x.is_cpu and x.dim() == 0:  # a param, which is another tensor each time
            found.append(x.item())
        elif x.is_inference():  # nobody counts what is written to it
            return None
        else:
            found += [_form(x), Same(x)]
    return tuple(found)


def _form(x: Any) -> object:
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None
