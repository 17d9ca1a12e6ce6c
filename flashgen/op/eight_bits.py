"""Numbers of 8 bits: ``float8_e4m3fn``, and one factor for each sequence and key/value head.

A tensor holds x / factor, rounded; what attention means is a formula of the numbers times their factor. Caches of keys
and values may be of 8 bits beside queries of more (``cached.py``), or q, k and v all three.

In: the positional arguments of the operators that end in ``_f8``: q [B, H, Nq, D], k [B, Hkv, Nk, D] and v
[B, Hkv, Nk, Dv], and what each is multiplied by, float32 [B, Hkv], or [0, 0] where by nothing; the factor of q is that
of its head's key/value head. Out: o [B, H, Nq, Dv] in bfloat16, lse [B, H, Nq]. There are no gradients.

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
from flashgen.op.conversion import as_float, as_number, check_device
from flashgen.op.signature import F8

_LARGEST = 448.0


def factors_of(
    name: str, given: object, of: tuple[str, Tensor], wanted: tuple[int, int], device: torch.device
) -> Tensor:
    """The factors [B, Hkv] of a tensor and its name, float32; [0, 0] where it has none, and where it has more bits.

    ``given`` is None, a number, or a tensor that broadcasts to [B, Hkv]. Raises ``TypeError`` and ``ValueError``.
    """
    if given is None:
        return torch.zeros((0, 0), dtype=torch.float32, device=device)
    owner, x = of
    if x.dtype is not F8:
        what = "a cache" if owner.endswith("_cache") else "q, k and v"
        raise ValueError(f"'{name}' goes with {what} of 8 bits ({F8}), but '{owner}' is {x.dtype}")
    number = as_number(given, whole=False)
    if number is not None:
        return torch.full(wanted, as_float(name, number), dtype=torch.float32, device=device)
    if not isinstance(given, Tensor):
        raise TypeError(f"'{name}' must be a number or a tensor (f32[B, Hkv]), not {type(given).__name__}")
    if not given.is_floating_point():
        raise TypeError(f"'{name}' is {given.dtype}; f32[B, Hkv] is expected")
    check_device(f"'{name}'", given, device)
    if given.dim() > 2 or any(
        have not in (1, want) for have, want in zip(reversed(given.shape), reversed(wanted), strict=False)
    ):
        raise ValueError(f"'{name}' has shape {list(given.shape)}; [B, Hkv] = {list(wanted)} is expected")
    return given.float().expand(wanted).contiguous()


def to_8_bits(x: Tensor, factors: Tensor) -> Tensor:
    """What a cache holds of x [B, Hkv, rows, width]: numbers beyond ±448 factors become the largest there are."""
    numbers = x.float()
    if factors.numel():
        numbers = numbers / factors[:, :, None, None]
    return numbers.clamp(-_LARGEST, _LARGEST).to(F8)


def from_8_bits(x: Tensor, factors: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that x [..., H or Hkv, N, width] means, rounded to ``dtype`` once.

    ``factors`` are [..., Hkv], that of a head its key/value head's; None or empty: there are none.
    """
    if factors is None or not factors.numel():
        return x.to(dtype)  # each is one of the type
    exact = torch.promote_types(dtype, torch.float32)
    by_head = factors.to(exact).repeat_interleave(x.shape[-3] // factors.shape[-1], -1)
    return (x.to(exact) * by_head[..., None, None]).to(dtype)


def fitting_factors(x: Tensor, kv_heads: int) -> Tensor:
    """Factors [B, Hkv] by which the largest number of each of x [B, H or Hkv, N, width] becomes the largest there is.

    Float32; 1 where all are zero.
    """
    largest = x.float().abs().amax((2, 3)).view(x.shape[0], kv_heads, -1).amax(2)
    return torch.where(largest > 0, largest / _LARGEST, 1.0)


def rounded_weights(weights: Tensor, phase: float = 1.0) -> Tensor:
    """Weights [..., Nk] as numbers of 8 bits hold them, of which each row has the largest between 128 and 256.

    They are multiplied by ``phase`` in [1, 2) before: what is rounded away depends on where powers of two lie.
    """
    wide = weights.double()
    top = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros(1)
    scale = torch.where((top > 0) & top.isfinite(), phase * torch.exp2(7 - torch.floor(torch.log2(top))), 1.0)
    return ((wide * scale).float().clamp(-_LARGEST, _LARGEST).to(F8).double() / scale).to(weights.dtype)


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
