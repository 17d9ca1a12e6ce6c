"""Measures calls of 8 bits: against float64, beside bfloat16 and beside the usual way to get by with 8 bits.

In: an ``AttentionOp`` and shapes. Out: an ``F8Case`` for each head dimension and shape, with a row for o and one for
lse. All numbers are relative in the Frobenius norm; the first three are distances from the float64 formula of the
inputs before they were rounded:

    error        the op on q, k and v of 8 bits, with a factor for each batch entry and key/value head
    wide         the op on the same inputs in bfloat16, where the spec has it, else in float16, else in float32
    per_tensor   one factor a tensor: q, k and v rounded to 8 bits, widened, and the formula in float32

    rounding     the op on 8 bits against the float64 formula of these very numbers: what it computes with is inexact
    tolerance    2 · the same of the formula composed of PyTorch's operators in bfloat16, its weights rounded to 8 bits,
                 and one rounding step of the result's type; this is what is judged. Of several ways to put powers of
                 two among the weights it is the worst: the formula may know a row's largest weight exactly
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.eight_bits import fitting_factors, from_8_bits, rounded_weights, to_8_bits
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification.inputs import Inputs, random_inputs
from flashgen.verification.verify import Results, call_op, dense, relative_error, widened

PHASES = (1.0, 1.3, 1.7)
_WIDE = (ElementType.BF16, ElementType.F16, ElementType.F32)
_COLUMNS = {"error": "own", "wide": "wide", "per_tensor": "per_tensor"}
_STEP = torch.finfo(torch.bfloat16).eps  # lse is a float32, but sums of products are no better


@dataclass(frozen=True)
class F8Row:
    """The distances of one result (o or lse) of one case."""

    tensor: str
    error: float
    wide: float
    per_tensor: float
    rounding: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error that the op adds to the rounding of its inputs is within tolerance."""
        return self.rounding <= self.tolerance


@dataclass(frozen=True)
class F8Case:
    """The results at one head dimension and shape; ``wide`` is the type that calls of 8 bits are compared with."""

    head_dim: HeadDim
    shape: Shape
    wide: ElementType
    rows: tuple[F8Row, ...]


def verify_f8(op: AttentionOp, shapes: Sequence[Shape], *, seed: int = 0, device: str = "cpu") -> Iterator[F8Case]:
    """Every head dimension of a spec that takes 8 bits at every shape."""
    for head_dim in op.spec.head_dims:
        for number, shape in enumerate(shapes):
            inputs = random_inputs(op.spec, shape, head_dim, torch.float32, seed=seed, realistic=number % 2 == 1)
            yield F8Case(head_dim, shape, wide_of(op), rows_of(op, inputs.to(device)))


def wide_of(op: AttentionOp) -> ElementType:
    """The type that calls of 8 bits are compared with."""
    return next(each for each in _WIDE if op.spec.dtypes is None or each in op.spec.dtypes)


def rows_of(op: AttentionOp, inputs: Inputs) -> tuple[F8Row, ...]:
    """The rows for inputs in float32."""
    kv_heads = inputs.k.shape[1]
    factors = [fitting_factors(x, kv_heads) for x in inputs.rows]
    by_head = [each.repeat_interleave(x.shape[1] // kv_heads, 1) for x, each in zip(inputs.rows, factors, strict=True)]
    narrow = _with(inputs, [to_8_bits(x, each) for x, each in zip(inputs.rows, by_head, strict=True)])
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    wide = _with(inputs, [x.to(TORCH_DTYPES[wide_of(op)]) for x in inputs.rows])
    with torch.no_grad():
        own = call_op(op, *narrow.rows, {**descales, **inputs.named})
        beside = call_op(op, *wide.rows, inputs.named)
    numbers = _with(inputs, [from_8_bits(x, each, torch.float64) for x, each in zip(narrow.rows, factors, strict=True)])
    per_tensor = _with(inputs, [_by_one_factor(x) for x in inputs.rows])
    found = {
        "truth": _formula(op, widened(inputs), torch.float64),
        "own": own,
        "wide": beside,
        "per_tensor": _formula(op, per_tensor, torch.float32),
        "exact": _formula(op, widened(numbers), torch.float64),
    }
    composed = [
        dense(op.spec, *numbers.rows, inputs.named, torch.bfloat16, functools.partial(rounded_weights, phase=phase))
        for phase in PHASES
    ]
    return tuple(
        _row(name, {key: x[n] for key, x in found.items()}, [x[n] for x in composed])
        for n, name in enumerate(("o", "lse") if op.spec.weights.form.normalised else ("o",))
    )


def _row(name: str, found: Mapping[str, Tensor | None], composed: Sequence[Tensor | None]) -> F8Row:
    def distance(value: Tensor | None, of: str = "truth") -> float:
        truth = found[of]
        assert value is not None
        assert truth is not None
        return relative_error(value, truth)

    errors = {name: distance(found[which]) for name, which in _COLUMNS.items()}
    tolerance = 2.0 * max(distance(each, "exact") for each in composed) + _STEP
    return F8Row(name, **errors, rounding=distance(found["own"], "exact"), tolerance=tolerance)


def _with(inputs: Inputs, rows: Sequence[Tensor]) -> Inputs:
    q, k, v = rows
    return replace(inputs, q=q, k=k, v=v)


def _by_one_factor(x: Tensor) -> Tensor:
    factor = fitting_factors(x.flatten(0, 1)[None], 1)
    return from_8_bits(to_8_bits(x, factor.expand(x.shape[0], x.shape[1])), factor.expand(x.shape[0], 1), torch.float32)


def _formula(op: AttentionOp, inputs: Inputs, dtype: torch.dtype) -> Results:
    return dense(op.spec, *inputs.rows, inputs.named, dtype)
