"""Whether results are those of the dense formula, or as far off as a float32 program may be.

The rule is that of ``verification/verify.py``: an error of at most twice that of the same formula in PyTorch, in the
tensors' type, plus a rounding. What is beyond it is asked once more: if a float32 program with an error of a few units
in each operation (``rounding.py``), or the formula in float32 itself, may be as far off, the input is borderline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.op.signature import F8
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import DIRECTIONS, FLOAT32_TOLERANCE, norm, numbers_like, relative_error, widened
from tools.fuzz.draws import CallDraw
from tools.fuzz.inputs import Arguments, plain
from tools.fuzz.rounding import OutOfRange, Rounded
from tools.fuzz.running import Results, dense, is_second, reference, second

_TRIALS = 6
_MARGIN = 2.0


def compare(
    spec: AttentionSpec,
    call: CallDraw,
    values: Arguments,
    own: Results,
    phases: Sequence[float] = (),
    moved: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Mapping[str, str], int]:
    """What is wrong, in words by the names of results, and how many results no float32 program can tell.

    ``phases``: kernels make weights numbers of 8 bits, and so does the formula in PyTorch, in so many ways. ``moved``:
    how far results may be off, by their norm, which are sums of parts that had to be rounded.
    """
    given = plain(values.inputs).to("cpu")
    wide = widened(given)
    own = {name: result.cpu() for name, result in own.items()}
    truth = reference(spec, values, wide, call, torch.float64)
    composed = [
        reference(spec, dataclasses.replace(values, phase=phase), given, call, _wide(given))
        for phase in phases or (0.0,)
    ]
    if "lse" in truth:
        unknown = own["lse"].isnan()
        # Where weights add up to infinity, o is no number; then lse, log(inf), may be none, too.
        own["lse"] = _forgiven(own["lse"], truth["lse"], truth["lse"] == torch.inf)
        if "t_lse" in truth:  # that of a row whose lse is none, and judged: NaN, though what moves be v alone, and it 0
            own["t_lse"] = _forgiven(own["t_lse"], truth["t_lse"], unknown)
    if truth["o"].isnan().any():  # its gradients are none: where() and clamp() of PyTorch drop them, slopes of 0 do not
        for name in own.keys() - {"o", "lse", "t_o", "t_lse"}:
            own[name] = _forgiven(own[name], truth[name], truth[name] == 0.0)
    suspects: dict[str, tuple[float, float]] = {}
    for name, exact in truth.items():
        error, reached = relative_error(own[name], exact), max(relative_error(each[name], exact) for each in composed)
        tolerance = 2.0 * reached + torch.finfo(own[name].dtype).eps
        if name in moved:
            tolerance += moved[name] / (norm(exact) or 1.0)
        if given.q.dtype is torch.float32:
            tolerance = max(tolerance, FLOAT32_TOLERANCE)
        if not error <= tolerance:
            suspects[name] = (error, tolerance)
    if not suspects:
        return {}, 0
    if _is_lost_in_float64(spec, values, wide, truth, own):
        return {}, len(suspects)
    possible = _possible_errors(spec, values, given, call, truth, own["o"])
    wrong = {
        name: f"error {error:.2e}, tolerance {tolerance:.2e}, float32 programs up to {possible[name]:.2e}"
        for name, (error, tolerance) in suspects.items()
        if not error <= _MARGIN * possible[name] + tolerance and not math.isinf(possible[name])
    }
    return wrong, len(suspects) - len(wrong)


def _wide(given: Inputs) -> torch.dtype:
    """The type that PyTorch's formula is composed in: that of the tensors, where it computes with them."""
    return torch.bfloat16 if given.q.dtype is F8 else given.q.dtype


def _forgiven(own: Tensor, truth: Tensor, where: Tensor) -> Tensor:
    """The same, but the truth for NaN at some places."""
    return torch.where(where & own.isnan(), truth.to(own.dtype), own)


def _is_lost_in_float64(spec: AttentionSpec, values: Arguments, wide: Inputs, truth: Results, own: Results) -> bool:
    """Whether weights are out of the range of float64, and a row has no log-sum-exp by the formula that a kernel has.

    Kernels know that ``normalize(exp(s))`` is a softmax, and weigh scores of 900, or -900, by their differences.
    """
    if "lse" not in truth or not (~truth["lse"].isfinite() & own["lse"].isfinite()).any():
        return False
    with OutOfRange() as seen:
        dense(spec, values, wide, torch.float64)
    return bool(seen.happened)


def _possible_errors(
    spec: AttentionSpec, values: Arguments, given: Inputs, call: CallDraw, truth: Results, o: Tensor
) -> Mapping[str, float]:
    """How far the results of float32 programs may be off that take operands of products in the tensors' type."""
    operands = torch.finfo(_wide(given)).eps / 2 if given.q.dtype is not torch.float32 else 0.0
    wide = widened(given)
    tried = [reference(spec, values, wide, call, torch.float32)]
    torch.set_flush_denormal(True)  # as kernels do
    tried.append(reference(spec, values, wide, call, torch.float32))
    torch.set_flush_denormal(False)
    for seed in range(_TRIALS):
        with Rounded(seed, operands):
            tried.append(reference(spec, values, wide, call, torch.float64))
    left = _left_by_rounding(spec, values, wide, call, o)
    return {
        name: max(relative_error(each[name], exact) for each in tried) + left.get(name, 0.0) / (norm(exact) or 1.0)
        for name, exact in truth.items()
    }


def _left_by_rounding(
    spec: AttentionSpec, values: Arguments, wide: Inputs, call: CallDraw, o: Tensor
) -> Mapping[str, float]:
    """What the stored O leaves in each gradient through delta = Σ dO · O; see ``verify.left_by_rounding``."""
    if not spec.weights.form.normalised or values.held is not None or values.factors is not None:
        return {}
    leaves = {name: x.detach().requires_grad_() for name, x in wide.differentiable(spec).items() if name != "v"}
    moved = Inputs(
        leaves["q"],
        leaves["k"],
        wide.v,
        {name: leaves.get(name, x) for name, x in wide.captured.items()},
        {name: leaves.get(name, x) for name, x in wide.params.items()},
        wide.d_o,
        wide.d_lse,
    )
    exact, lse = dense(spec, values, moved, torch.float64)
    assert lse is not None, "only pointwise weights have none"
    if not lse.requires_grad:
        return {}
    kept = torch.where(lse.isfinite(), lse, 0.0)
    generator = torch.Generator().manual_seed(1)

    def signed(size: Tensor) -> Tensor:
        return size * (torch.randint(0, 2, size.shape, generator=generator).double() * 2 - 1)

    def gradients(arriving: Tensor) -> dict[str, float]:
        total, by = (arriving * kept).sum(), list(leaves.values())
        found = torch.autograd.grad(total, by, retain_graph=True, materialize_grads=True)
        return dict(zip(leaves, map(norm, found), strict=True))

    size = _delta_by_rounding(values, wide, exact.detach(), o.dtype)
    moves = call.mixed and is_second(call, values)
    size_of_tangent = (
        _delta_by_rounding(values, wide, _tangent_of_o(spec, values, wide, call), o.dtype) if moves else size
    )
    # The tangent of delta, which tangents of gradients have, is t(dO) · O + dO · tO: roundings of O and tO enter it.
    turned = dataclasses.replace(wide, d_o=numbers_like(wide.d_o, DIRECTIONS))
    size_of_turned = _delta_by_rounding(values, turned, exact.detach(), o.dtype)
    left: dict[str, float] = {}
    for _ in range(2):
        arriving = signed(size)
        more = {f"d{name}": found for name, found in gradients(arriving).items()}
        if moves:
            more |= _left_through_tangents(spec, values, wide, call, arriving)
            for name, found in gradients(signed(size_of_tangent)).items():
                more[f"dt_{name}"] = more.get(f"dt_{name}", 0.0) + found
            for name, found in gradients(signed(size_of_turned)).items():
                more[f"td_{name}"] = more[f"dt_{name}"] + found
        left = {name: max(found, left.get(name, 0.0)) for name, found in more.items()}
    return left


def _tangent_of_o(spec: AttentionSpec, values: Arguments, wide: Inputs, call: CallDraw) -> Tensor:
    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        return dense(spec, values, given, torch.float64)

    learned = dataclasses.replace(values, inputs=wide).learned(spec, call.wants)
    return second(spec, function, wide, learned, dataclasses.replace(call, mixed=False))["t_o"]


def _delta_by_rounding(values: Arguments, wide: Inputs, o: Tensor, dtype: torch.dtype) -> Tensor:
    """How far delta of rows may be off, as lse lies, where o is stored in a type."""
    size = (wide.d_o.abs() * o.abs()).sum(-1) * torch.finfo(dtype).eps / 2
    return size if values.starts is None else size.T


def _left_through_tangents(
    spec: AttentionSpec, values: Arguments, wide: Inputs, call: CallDraw, arriving: Tensor
) -> Mapping[str, float]:
    """The same of gradients through tangents, which delta enters by Σ delta · t_lse."""

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        o, lse = dense(spec, values, given, torch.float64)
        assert lse is not None, "only pointwise weights have none"
        return 0.0 * o, torch.where(lse.isfinite(), lse, 0.0)

    learned = dataclasses.replace(values, inputs=wide).learned(spec, call.wants)
    found = second(
        spec, function, dataclasses.replace(wide, d_lse=arriving), learned, dataclasses.replace(call, wants="all")
    )
    return {name: norm(x) for name, x in found.items() if name.startswith("dt_")}
