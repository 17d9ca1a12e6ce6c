"""Runs an operator forward and backward and measures its distance from the float64 reference.

In: an ``AttentionOp`` and shapes. Out: a ``Case`` for each head dimension, element type and shape, with a ``Row`` for
each result: o, lse, and every gradient. A row holds three numbers, all relative in the Frobenius norm:

    error       the operator against the reference
    baseline    the same formula composed of PyTorch's operators in the tensors' dtype, against the reference
    tolerance   2 · baseline + one rounding step of the result's dtype; in float32 at least 2e-5, as the baseline is
                sometimes exact by luck, where terms cancel; and with a single key what the rounding of O leaves

Of second derivatives, whose directions follow from the seed, there are rows for

    t_o, t_lse                  tangents of o and lse, where all inputs have tangents
    ddq, ddk, …, dd_o, dd_lse   gradients of Σ r · (dq, dk, …) by q, k, …, and by the gradients of o and lse
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.hosts.emulated import recording
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.plan.explanation import ExplainedPass
from flashgen.reference.dense import Dropout, attention, drop_probability, param_values
from flashgen.reference.shard import Shard
from flashgen.verification.hbm import HbmBytes, hbm_bytes
from flashgen.verification.inputs import Inputs, fitting, random_inputs

FLOAT32_TOLERANCE = 2e-5
DROPOUT_SEED = 20_240_229

_DEFAULT_DTYPES = (ElementType.F32, ElementType.BF16, ElementType.F16)
_MOST_PAIRS = 2**18
_ROUNDS, _FEW = 4, 64
_DEFAULT_SHAPES = (
    Shape(2, 4, 2, 113, 113),
    Shape(1, 2, 1, 77, 203),
    Shape(2, 2, 2, 5, 64),
    Shape(1, 1, 1, 256, 256),
)


@dataclass(frozen=True)
class Row:
    """One result of one case; gradients are named dq, dk, dv and d<name>."""

    tensor: str
    error: float
    baseline: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Case:
    """The results at one head dimension, element type and shape, and on the emulator bytes moved, by pass.

    ``derived_by``: what ran for tangents, and for gradients of gradients, of the second order.
    """

    head_dim: HeadDim
    dtype: ElementType
    shape: Shape
    rows: tuple[Row, ...]
    hbm_bytes: Mapping[str, HbmBytes] = field(default_factory=dict)
    derived_by: tuple[str, str] | None = None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def default_shapes(spec: AttentionSpec) -> tuple[Shape, ...]:
    """Odd, uneven and grouped shapes, as near as the spec accepts."""
    return tuple(dict.fromkeys(fitting(spec, shape, pairs=_MOST_PAIRS) for shape in _DEFAULT_SHAPES))


def verify(
    op: AttentionOp, shapes: Sequence[Shape], *, seed: int = 0, device: str = "cpu", order: int = 1
) -> Iterator[Case]:
    """Every head dimension and element type of the spec at every shape, on tensors of a device.

    With ``order`` 2 tangents and gradients of gradients are judged, too. Captured tensors are
    noise at the first shape, such as users have at the second, and so on in turn: masks of noise leave no tile full or
    empty.
    """
    for head_dim in op.spec.head_dims:
        for dtype in op.spec.dtypes or _DEFAULT_DTYPES:
            for number, shape in enumerate(shapes):
                realistic = number % 2 == 1
                yield verify_case(
                    op, head_dim, dtype, shape, seed=seed, device=device, realistic=realistic, order=order
                )


def verify_case(
    op: AttentionOp,
    head_dim: HeadDim,
    dtype: ElementType,
    shape: Shape,
    *,
    seed: int = 0,
    device: str = "cpu",
    realistic: bool = False,
    order: int = 1,
) -> Case:
    """One case on random inputs.

    Where a result has few elements, the errors of several inputs are taken together: that of one number says little.
    """

    def drawn(seed: int) -> Inputs:
        return random_inputs(op.spec, shape, head_dim, TORCH_DTYPES[dtype], seed=seed, realistic=realistic)

    first = drawn(seed)
    rounds = _ROUNDS if any(x.numel() < _FEW for x in first.differentiable(op.spec).values()) else 1
    more = [drawn(seed + 1000 * n) for n in range(1, rounds)]
    inputs = [each.to(device) for each in (first, *more)]
    with recording() as counted:
        rows = compare(op, inputs)
    derived_by = None
    if order > 1:
        rows += compare(op, inputs, second_order)
        derived_by = _derived_by(op, inputs[0])
    return Case(head_dim, dtype, shape, rows, hbm_bytes(op, first, counted), derived_by)


def _derived_by(op: AttentionOp, inputs: Inputs) -> tuple[str, str]:
    """The kernels that ran for second derivatives of a call, or what ran in their place."""
    told = op.explain(inputs.q, inputs.k, inputs.v, seed=DROPOUT_SEED, **inputs.named)
    other = "the formula by PyTorch's operators"

    def named(each: ExplainedPass | None) -> str:
        return other if each is None else ", ".join(kernel.name for kernel in each.kernels)

    return named(told.jvp), named(told.jvp_backward)


Results = tuple[Tensor, Tensor | None]  # o and lse; None: there is none
Function = Callable[[Mapping[str, Tensor]], Results]  # of the tensors by name
_Call = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Results]
_Measured = Callable[[Function, Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]]


def first_order(function: Function, learned: Mapping[str, Tensor], d_o: Tensor, d_lse: Tensor) -> dict[str, Tensor]:
    """o, lse and every gradient."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    o, lse = function(leaves)
    results = {"o": (o, d_o), **({} if lse is None else {"lse": (lse, d_lse.to(lse.dtype))})}
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves.values()]
    connected = [each for each in results.values() if each[0].requires_grad]
    if connected:  # where there are no keys, results are constants
        outputs, arriving = zip(*connected, strict=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, materialize_grads=True)
    own = {name: x.detach() for name, (x, _) in results.items()}
    return own | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def compare(op: AttentionOp, inputs: Sequence[Inputs], measured: _Measured = first_order) -> tuple[Row, ...]:
    """The rows of a case, from several sets of inputs of one type together."""
    spec, dtype = op.spec, inputs[0].q.dtype

    def found(call: _Call, of: Inputs) -> dict[str, Tensor]:
        return measured(of_learned(call, of), of.differentiable(spec), of.d_o, of.d_lse)

    def formula(dtype: torch.dtype) -> _Call:
        return lambda q, k, v, named: dense(spec, q, k, v, named, dtype)

    truth = _together([found(formula(torch.float64), widened(each)) for each in inputs])
    baseline = _together([found(formula(dtype), each) for each in inputs])
    compiled = [found(functools.partial(call_op, op), each) for each in inputs]
    own, left = _together(compiled), collections.Counter[str]()
    if inputs[0].k.shape[2] == 1 and measured is first_order:
        for each, mine in zip(inputs, compiled, strict=True):
            left.update(left_by_rounding(spec, each, mine["o"]))
    return tuple(
        _row(name, own[name], baseline[name], truth[name], left[name], is_float32=dtype is torch.float32)
        for name in truth
    )


def call_op(op: AttentionOp, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any]) -> Results:
    """o and lse of an op."""
    if not op.spec.weights.form.normalised:
        return op(q, k, v, seed=DROPOUT_SEED, **named), None
    return op(q, k, v, seed=DROPOUT_SEED, return_lse=True, **named)


def of_learned(call: _Call, inputs: Inputs) -> Function:
    """A call as a function of the tensors that are differentiated by."""

    def function(learned: Mapping[str, Tensor]) -> Results:
        named = {name: learned.get(name, value) for name, value in inputs.named.items()}
        return call(learned["q"], learned["k"], learned["v"], named)

    return function


def left_by_rounding(spec: AttentionSpec, inputs: Inputs, o: Tensor) -> dict[str, float]:
    """The error in each gradient, in the Frobenius norm, that follows from rounding the stored ``o``, by its row's
    name.

    The derivative of a row's scores is P · (dP - delta), where delta = Σ_d dO_d O_d is formed from the stored O. With a
    single key only the gradient of lse is left of the difference. PyTorch, whose P is exactly 1 there, cancels without
    an error. As P ∂s = ∂lse, an error of delta changes a gradient as much as that part of the gradient of lse.
    """
    if not spec.weights.form.normalised:
        return {}
    wide = widened(inputs)
    leaves = {name: x.requires_grad_() for name, x in wide.differentiable(spec).items()}
    formula = of_learned(lambda q, k, v, named: dense(spec, q, k, v, named, torch.float64), wide)
    exact, lse = formula(leaves)
    assert lse is not None
    delta = (wide.d_o * (o.double() - exact.detach())).sum(-1)
    learned = {name: x for name, x in leaves.items() if name != "v"}
    left = dict.fromkeys((f"d{name}" for name in learned), 0.0)
    for row in (delta * lse).flatten(1).unbind(1):
        found = torch.autograd.grad(
            row.sum(), list(learned.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(learned, found, strict=True):
            left[f"d{name}"] += float(torch.linalg.vector_norm(gradient))
    return left


def _together(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def dense(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    named: Mapping[str, Any],
    dtype: torch.dtype,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Results:
    """The reference, with the captured tensors and params that an operator takes by name."""
    names = {tensor.name for tensor in spec.tensors}
    params = {name: value for name, value in named.items() if name not in names}
    plain = {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in params.items()}
    sizes = Shard.whole(q.shape, k.shape).sizes(q.shape[-1], v.shape[-1])
    probability = drop_probability(spec, param_values(spec, plain, sizes), sizes)
    return attention(
        spec,
        q,
        k,
        v,
        tensors={name: value for name, value in named.items() if name in names and isinstance(value, Tensor)},
        params=params,
        dropout=Dropout(probability, DROPOUT_SEED) if probability else None,
        dtype=dtype,
        rounded=rounded,
    )


def widened(inputs: Inputs) -> Inputs:
    """The same values in float64."""
    return inputs.mapped(lambda x: x.double() if x.is_floating_point() else x)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; infinite where infinities disagree.

    A NaN of the truth says nothing: float64 leaves its range elsewhere than float32, and a row is NaN as a whole.
    """
    value, truth = value.detach().double(), truth.detach().double()
    if value.shape != truth.shape:
        return math.inf
    finite, endless = truth.isfinite(), truth.isinf()
    if not torch.equal(value[endless], truth[endless]):
        return math.inf
    distance = float(torch.linalg.vector_norm(value[finite] - truth[finite]))
    return math.inf if math.isnan(distance) else distance / (norm(truth) or 1.0)


def norm(truth: Tensor) -> float:
    """The Frobenius norm without infinities and NaNs."""
    return float(torch.linalg.vector_norm(truth[truth.isfinite()].double()))


def _row(name: str, own: Tensor, baseline: Tensor, truth: Tensor, left: float, *, is_float32: bool) -> Row:
    exact = truth.double()
    # Where the formula leaves the range of the tensors' type it says nothing of what may be reached; so may a kernel.
    lost = ~baseline.isfinite() & exact.isfinite()
    own_lost = lost & torch.isclose(own, baseline.to(own.dtype), equal_nan=True)
    reached = relative_error(torch.where(baseline.isfinite() & exact.isfinite(), baseline.double(), exact), exact)
    tolerance = 2.0 * reached + torch.finfo(own.dtype).eps + left / (norm(truth) or 1.0)
    if is_float32:
        tolerance = max(tolerance, FLOAT32_TOLERANCE)
    return Row(name, relative_error(torch.where(own_lost, exact, own.double()), exact), reached, tolerance)


# Second derivatives, of an operator and of the formula alike ----------------------------------------------------------


_TANGENTS, DIRECTIONS = 7_001, 7_002


def second_order(
    function: Function,
    learned: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
    still: Collection[str] = (),
) -> dict[str, Tensor]:
    """The second derivatives. ``d_lse`` None: no gradient arrives at lse; ``still``: inputs without a tangent."""
    moves = moves_of(learned, still)
    return {**_tangents(function, learned, moves), **_gradients_of_gradients(function, learned, d_o, d_lse)}


def _tangents(function: Function, learned: Mapping[str, Tensor], moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with forward_ad.dual_level():
        duals = {name: x.detach() for name, x in learned.items()}
        for name, tangent in moves.items():
            duals[name] = forward_ad.make_dual(duals[name].contiguous(), tangent)  # type: ignore[no-untyped-call]
        results = {"t_o": (found := function(duals))[0], "t_lse": found[1]}
        tangents = {
            name: (x, forward_ad.unpack_dual(x).tangent)  # type: ignore[no-untyped-call]
            for name, x in results.items()
            if x is not None
        }
    return {name: torch.zeros_like(x) if t is None else t for name, (x, t) in tangents.items()}


def _gradients_of_gradients(
    function: Function, learned: Mapping[str, Tensor], d_o: Tensor, d_lse: Tensor | None
) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    o, lse = function(leaves)
    arriving = {"_o": d_o.to(o.dtype).detach().clone().requires_grad_()}
    reached = [(o, arriving["_o"])]
    if lse is not None and d_lse is not None:
        arriving["_lse"] = d_lse.to(lse.dtype).detach().clone().requires_grad_()
        reached.append((lse, arriving["_lse"]))
    by = {**leaves, **arriving}
    reached = [(x, gradient) for x, gradient in reached if x.requires_grad]
    terms: list[Tensor] = []
    if reached:
        outputs, gradients = zip(*reached, strict=True)
        first = torch.autograd.grad(
            outputs, list(leaves.values()), gradients, create_graph=True, materialize_grads=True
        )
        terms = [(x * numbers_like(x, DIRECTIONS + n)).sum().double() for n, x in enumerate(first) if x.requires_grad]
    if not terms:
        return {f"dd{name}": torch.zeros_like(x) for name, x in by.items()}
    second = torch.autograd.grad(sum(terms[1:], terms[0]), list(by.values()), materialize_grads=True)
    return {f"dd{name}": x for name, x in zip(by, second, strict=True)}


def moves_of(learned: Mapping[str, Tensor], still: Collection[str]) -> dict[str, Tensor]:
    """A tangent for each tensor by name, without those that are ``still``."""
    return {name: numbers_like(x, _TANGENTS + n) for n, (name, x) in enumerate(learned.items()) if name not in still}


def numbers_like(x: Tensor, seed: int) -> Tensor:
    """Normal numbers of the shape and type of ``x``, the same on every device and, but for rounding, in every type."""
    numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device=x.device, dtype=x.dtype)
