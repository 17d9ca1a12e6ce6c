"""Calls on q, k and v of 8 bits: by kernels for them where there are some, else on numbers of more bits.

In: the positional arguments of the operators that end in ``_f8``: q [B, H, Nq, D], k [B, Hkv, Nk, D] and v
[B, Hkv, Nk, Dv] in ``float8_e4m3fn``, and what each is multiplied by, float32 [B, Hkv], or [0, 0] where by nothing;
the factor of q is that of its head's key/value head. Out: o [B, H, Nq, Dv] in bfloat16, lse [B, H, Nq]. There are no
gradients.

Hopper's kernels multiply 8 bits by 8 bits and apply factors to sums. Everywhere else q, k and v are multiplied by their
factors first, rounded to the type that ``wide_type`` says, and the op's own kernels run on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.kinds.eight_bits import DESCALES
from flashgen.op.call import CallChecker, KindCall, Rest, Tensors
from flashgen.op.eight_bits import factors_of, from_8_bits

_ORDER_ON_CPUS = (torch.float32, torch.bfloat16, torch.float16)
_ORDER_ON_GPUS = (torch.bfloat16, torch.float16, torch.float32)


def factors_of_call(rows: Sequence[Tensor], given: Sequence[object]) -> tuple[Tensor, ...]:
    """The factors of q, k and v, as the operator takes them. Raises ``TypeError`` and ``ValueError``."""
    q, k, v = rows
    wanted = (q.shape[0], k.shape[1]) if q.dim() == k.dim() == 4 else (0, 0)  # which the call then refuses
    named = zip(DESCALES, given, zip("qkv", (q, k, v), strict=True), strict=True)
    return tuple(factors_of(name, each, of, wanted, q.device) for name, each, of in named)


def wide_type(dtypes: Sequence[torch.dtype], device: torch.device) -> torch.dtype:
    """The type that 8 bits are widened to where no kernel takes them: the exact one on a CPU, a fast one on a GPU."""
    order = _ORDER_ON_CPUS if device.type == "cpu" else _ORDER_ON_GPUS
    return next(dtype for dtype in order if dtype in dtypes)


@dataclass(frozen=True)
class F8Call(KindCall):
    """A call of 8 bits, with the factors of q, k and v."""

    factors: Sequence[Tensor]

    def widened(self, dtypes: Sequence[torch.dtype]) -> Tensors:
        """The tensors of the call in the ``wide_type``."""
        dtype = wide_type(dtypes, self.call.device)
        wide = (from_8_bits(x, each, dtype) for x, each in zip(self.tensors[:3], self.factors, strict=True))
        return (*wide, *self.tensors[3:])


def kind_call(checker: CallChecker, tensors: Tensors, rest: Rest, _derives: bool) -> F8Call:
    """The call of an operator's arguments. Raises ``ValueError`` and ``TypeError``."""
    own, factors = tensors[: -len(DESCALES)], tensors[-len(DESCALES) :]
    return F8Call(checker.find(own, rest), own, rest, [x.data_ptr() for x in factors], factors)
