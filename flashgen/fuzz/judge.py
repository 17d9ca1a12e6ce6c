"""Whether a case is computed as its spec says: every result, every gradient, repeats, and bytes on the emulator.

In: a ``Case``. Out: a ``Verdict``. The rule for numbers is that of ``verification/verify.py``: an error of at most
twice that of the same formula in PyTorch, in the tensors' type, plus a rounding. What is beyond it is asked once more:
if a float32 program with an error of a few units in each operation (``rounding.py``), or the formula in float32
itself, may be as far off, the input is borderline, and counted apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgen.backends import kernel_variant, takes_f8
from flashgen.diagnostics import SpecError
from flashgen.fuzz.compiling import compiled
from flashgen.fuzz.coverage import kinds
from flashgen.fuzz.draws import CallDraw, Case
from flashgen.fuzz.inputs import Arguments, Held, arguments, head_dim_of, plain
from flashgen.fuzz.parts import has_parts, in_parts
from flashgen.fuzz.ranks import Fault, ask
from flashgen.fuzz.rounding import OutOfRange, Rounded
from flashgen.fuzz.spread import joined
from flashgen.ir.spec import AttentionSpec
from flashgen.reference.dense import Dropout, attention, drop_probability, param_values
from flashgen.reference.shard import Shard
from flashgen.runtime.compiler import CompileFailed
from flashgen.runtime.eight_bits import F8, rounded_weights
from flashgen.runtime.emulated import Counted, recording
from flashgen.runtime.emulator import EmulatorError
from flashgen.runtime.op import AttentionOp
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.registry import GPUS
from flashgen.verification.f8 import PHASES
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs
from flashgen.verification.second_order import second_order
from flashgen.verification.verify import FLOAT32_TOLERANCE, relative_error, widened

Results = dict[str, Tensor]
_Function = Callable[[Inputs], "tuple[Tensor, Tensor | None]"]
# Diagnostics by which a spec that the language allows is refused for a target, or that say what no text can tell.
REFUSALS = frozenset({"E205", "E206", "E207", "E211", "E308", "E403", "E404", "E406", "E111"})
_TRIALS = 6
_MARGIN = 2.0


@dataclass(frozen=True)
class Finding:
    """Something wrong. ``kind`` is one word for its like, ``detail`` for people; ``call`` counts from 0, -1: none."""

    kind: str
    detail: str
    call: int = -1


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    ``refused`` is why nothing was judged; ``borderline`` are results that float32 cannot tell; ``kinds`` says which
    kernels ran.
    """

    findings: tuple[Finding, ...] = ()
    refused: str = ""
    results: int = 0
    borderline: int = 0
    kinds: tuple[str, ...] = ()


def judge(case: Case, scratch: Path) -> Verdict:
    """Compile and run a case. Whatever goes wrong is a finding; a crash of the process is for the caller to see."""
    try:
        op = compiled(case, scratch)
        spec = op.spec
    except SpecError as error:
        return _refused(error)
    except CompileFailed as failure:
        return _does_not_compile(failure)
    except Exception as error:  # a bug of the compiler
        return Verdict((Finding("compiler", _said(error)),))
    judged = [
        _judge_call(op, spec, case, number) if call.ranks is None else _judge_ranks(spec, case, number, scratch)
        for number, call in enumerate(case.calls)
    ]
    reasons = [each.refused for each in judged if each.refused]
    return Verdict(
        tuple(finding for each in judged for finding in each.findings),
        reasons[0] if reasons and not any(each.results or each.findings for each in judged) else "",
        sum(each.results for each in judged),
        sum(each.borderline for each in judged),
        tuple(dict.fromkeys(kind for each in judged for kind in each.kinds)),
    )


def _refused(error: SpecError) -> Verdict:
    errors = [each for each in error.diagnostics if each.severity == "error"]
    first = errors[0]
    if all(each.code in REFUSALS for each in errors):
        return Verdict(refused=f"{first.code} {first.message}")
    wrong = next(each for each in errors if each.code not in REFUSALS)
    return Verdict((Finding(f"check {wrong.code}", wrong.message),))


def _does_not_compile(failure: CompileFailed) -> Verdict:
    lines = [line for line in failure.log.splitlines() if "error" in line]
    return Verdict((Finding("does not compile", (lines or [str(failure)])[0]),))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _judge_call(op: AttentionOp, spec: AttentionSpec, case: Case, number: int) -> Verdict:
    call = case.calls[number]
    torch.set_num_threads(call.threads)
    counted: Sequence[Counted] = ()
    try:
        values = arguments(spec, call, case.machine.device)
        with recording() as counted:
            own = run(op, spec, values, call)
        findings = [*_repeats(op, spec, values, call, own, number), *_bytes(op, spec, case, values, counted, number)]
        ran = kinds(op, spec, call, counted)
        if _is_second(call, values):
            own |= _second(spec, _calls(op, spec, values), values.inputs, values.learned(spec, call.wants), call)
    except EmulatorError as error:
        return Verdict((Finding(f"emulator: {error.kind}", str(error), number),))
    except SpecError as error:  # a GPU's kernels are compiled when a call wants them
        return _refused(error)
    except CompileFailed as failure:
        return _does_not_compile(failure)
    except (ValueError, TypeError, UnsupportedGpu) as error:
        return Verdict(refused=str(error))
    except Exception as error:  # a bug of ours
        return Verdict((Finding("call", _said(error), number),))
    wrong, borderline = compare(spec, call, values, own, PHASES if _rounds_weights(case, spec, call) else ())
    findings += [Finding(f"wrong {name}", text, number) for name, text in wrong.items()]
    return Verdict(tuple(findings), "", len(own), borderline, ran)


def _judge_ranks(spec: AttentionSpec, case: Case, number: int, scratch: Path) -> Verdict:
    """A call that is spread over ranks: what all of them found, and how it was sent."""
    call = case.calls[number]
    try:
        values = arguments(spec, call)
    except (ValueError, TypeError) as error:
        return Verdict(refused=str(error))
    said = ask(case, number, scratch)
    if isinstance(said, Fault):
        return Verdict((Finding(said.kind, said.detail, number),))
    if said[0].refused:
        return Verdict(refused=said[0].refused)
    own, told = joined(said, call)
    wrong, borderline = compare(spec, call, values, own)
    findings = [Finding(kind, text, number) for kind, text in told.items()]
    findings += [Finding(f"wrong {name}", text, number) for name, text in wrong.items()]
    return Verdict(tuple(findings), "", len(own), borderline, (f"{call.ranks}{', ragged' if call.lengths else ''}",))


def _rounds_weights(case: Case, spec: AttentionSpec, call: CallDraw) -> bool:
    """Whether kernels multiply weights of 8 bits; of a GPU it is taken to be so, as it may be Hopper's."""
    target = "sm_90a" if case.machine.backend == "cuda" else case.machine.target
    if not call.eight_bits or not target:
        return False
    return takes_f8(kernel_variant(spec, head_dim_of(spec, call)), GPUS[target])


# --- running


def run(op: AttentionOp, spec: AttentionSpec, values: Arguments, call: CallDraw) -> Results:
    """o, lse and the gradients of a call."""
    return results_of(spec, _calls(op, spec, values, call), values.inputs, values.learned(spec, call.wants), call.wants)


def _calls(op: AttentionOp, spec: AttentionSpec, values: Arguments, drawn: CallDraw | None = None) -> _Function:
    """The op at these values, which may be leaves."""

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        call: Callable[..., Any] = op
        if values.held is not None:
            call = functools.partial(_cached, op, values.held)
        elif values.starts is not None:
            call = functools.partial(_ragged, op, values.starts)
        elif drawn is not None and drawn.parts and has_parts(spec):
            call = functools.partial(in_parts, op, drawn.parts, drawn.wide)
        if not spec.weights.form.normalised:
            return call(given.q, given.k, given.v, **values.options, **given.named), None
        o, lse = call(given.q, given.k, given.v, return_lse=True, **values.options, **given.named)
        return o, lse

    return function


def _ragged(op: AttentionOp, starts: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    return op.varlen(q, k, v, *starts, **others)


def _cached(op: AttentionOp, held: Held, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    """Rows that the call is to write are NaN in the cache before."""
    if not held.new:
        return op.decode(q, k, v, **others)
    written = [held.sequence(k, v, b, first, end) for b, (first, end) in enumerate(held.written)]
    new = [torch.stack(rows).to(q.dtype) for rows in zip(*written, strict=True)]
    for x in (k, v):
        held.put(x, [math.nan] * len(written), held.written)
    return op.decode(q, k, v, k=new[0], v=new[1], **others)


def reference(spec: AttentionSpec, values: Arguments, given: Inputs, call: CallDraw, dtype: torch.dtype) -> Results:
    """The same of the dense formula."""

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        return dense(spec, values, given, dtype)

    learned = dataclasses.replace(values, inputs=given).learned(spec, call.wants)
    found = results_of(spec, function, given, learned, call.wants)
    return found | _second(spec, function, given, learned, call) if _is_second(call, values) else found


def dense(spec: AttentionSpec, values: Arguments, given: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The reference at these values, which may be leaves."""
    if values.held is not None:
        return _dense_of_cache(spec, values, values.held, given, dtype)
    if values.starts is None:
        return _dense(spec, values, given, values.shard, dtype)
    heads, width = given.q.shape[1], given.v.shape[2]
    rows = [given.q.new_zeros((0, heads, width), dtype=dtype)]
    sums = [given.q.new_zeros((heads, 0), dtype=dtype)]
    for shard, q_rows, k_rows in values.sequences():
        if shard.is_empty:
            rows.append(given.q.new_zeros((shard.q_len, heads, width), dtype=dtype))
            sums.append(given.q.new_full((heads, shard.q_len), -torch.inf, dtype=dtype))
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (given.q[q_rows], given.k[k_rows], given.v[k_rows]))
        o, lse = _dense(spec, values, dataclasses.replace(given, q=q, k=k, v=v), shard, dtype)
        rows.append(o[0].transpose(0, 1))
        sums.append(sums[0] if lse is None else lse[0])
    return torch.cat(rows), torch.cat(sums, 1) if spec.weights.form.normalised else None


def _dense_of_cache(
    spec: AttentionSpec, values: Arguments, held: Held, given: Inputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    o = given.q.new_zeros((*given.q.shape[:-1], given.v.shape[3]), dtype=dtype)
    lse = given.q.new_full(given.q.shape[:-1], -torch.inf, dtype=dtype)
    for b, shard in values.of_cache():
        if shard.is_empty:
            continue
        length, padding = held.cached[b]
        k, v = (x[None] for x in held.sequence(given.k, given.v, b, padding, length))
        rows, sums = _dense(spec, values, dataclasses.replace(given, q=given.q[b : b + 1], k=k, v=v), shard, dtype)
        o[b] = rows[0]
        if sums is not None:
            lse[b] = sums[0]
    return o, lse if spec.weights.form.normalised else None


def _dense(
    spec: AttentionSpec, values: Arguments, given: Inputs, shard: Shard, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    plain_params = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in given.params.items()}
    sizes = shard.sizes(given.q.shape[-1], given.v.shape[-1])
    probability = 0.0  # over a cache nothing is dropped
    if values.held is None:
        probability = drop_probability(spec, param_values(spec, plain_params, sizes), sizes)
        probability = float(values.options.get("dropout_p", probability))
    return attention(
        spec,
        *(values.rows(given) if values.held is None else (given.q, given.k, given.v)),
        tensors=given.captured,
        params=given.params,
        shard=shard,
        dropout=Dropout(probability, values.options["seed"]) if probability else None,
        dtype=dtype,
        rounded=functools.partial(rounded_weights, phase=values.phase)
        if values.phase and dtype is torch.bfloat16
        else None,
    )


def _is_second(call: CallDraw, values: Arguments) -> bool:
    """Whether derivatives of the second order are judged; a cache has none, nor have 8 bits."""
    return call.order > 1 and values.held is None and values.factors is None


def _second(
    spec: AttentionSpec, function: _Function, given: Inputs, learned: Mapping[str, Tensor], call: CallDraw
) -> Results:
    """Tangents and gradients of gradients; as for gradients one arrives through lse with ``all``."""
    still = [name for name in learned if (name if name in ("q", "k", "v") else "captured") in call.still]

    def of_leaves(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return function(_with(spec, given, leaves))

    d_lse = given.d_lse if call.wants == "all" else None
    return second_order(of_leaves, learned, given.d_o, d_lse, still)


def _with(spec: AttentionSpec, given: Inputs, leaves: Mapping[str, Tensor]) -> Inputs:
    """The inputs with leaves in the place of what they are made of."""
    names = {tensor.name for tensor in spec.tensors}
    return Inputs(
        leaves.get("q", given.q),
        leaves.get("k", given.k),
        leaves.get("v", given.v),
        {name: leaves.get(name, x) for name, x in given.captured.items()},
        {name: x if name in names else leaves.get(name, x) for name, x in given.params.items()},
        given.d_o,
        given.d_lse,
    )


def results_of(
    spec: AttentionSpec,
    function: _Function,
    given: Inputs,
    learned: Mapping[str, Tensor],
    wants: str,
) -> Results:
    """o, lse and gradients. With ``all`` the gradient of lse arrives, too; else lse is only a result."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in learned.items()}
    o, lse = function(_with(spec, given, leaves))
    found = {"o": o.detach()}
    outputs, arriving = [o], [given.d_o]
    if lse is not None:
        found["lse"] = lse.detach()
        if wants == "all":
            outputs.append(lse)
            arriving.append(given.d_lse.to(lse.dtype))
    connected = [(x, gradient) for x, gradient in zip(outputs, arriving, strict=True) if x.requires_grad]
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if connected and leaves:
        results, arrived = zip(*connected, strict=True)
        gradients = torch.autograd.grad(results, list(leaves.values()), arrived, materialize_grads=True)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


# --- judging


def compare(
    spec: AttentionSpec, call: CallDraw, values: Arguments, own: Results, phases: Sequence[float] = ()
) -> tuple[Mapping[str, str], int]:
    """What is wrong, in words by the names of results, and how many results no float32 program can tell.

    ``phases``: kernels make weights numbers of 8 bits, and so does the formula in PyTorch, in so many ways.
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
        own["lse"] = _as_endless(own["lse"], truth["lse"])
    suspects: dict[str, tuple[float, float]] = {}
    for name, exact in truth.items():
        error, reached = relative_error(own[name], exact), max(relative_error(each[name], exact) for each in composed)
        tolerance = 2.0 * reached + torch.finfo(own[name].dtype).eps
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


def _as_endless(own: Tensor, truth: Tensor) -> Tensor:
    """Where weights add up to infinity, o is no number; then lse, log(inf), may be none, too."""
    return torch.where((truth == torch.inf) & own.isnan(), truth.to(own.dtype), own)


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
    for seed in range(_TRIALS):
        with Rounded(seed, operands):
            tried.append(reference(spec, values, wide, call, torch.float64))
    left = _left_by_rounding(spec, values, wide, o)
    return {
        name: max(relative_error(each[name], exact) for each in tried) + left.get(name, 0.0) / (_norm(exact) or 1.0)
        for name, exact in truth.items()
    }


def _left_by_rounding(spec: AttentionSpec, values: Arguments, wide: Inputs, o: Tensor) -> Mapping[str, float]:
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
    size = (wide.d_o.abs() * exact.detach().abs()).sum(-1) * torch.finfo(o.dtype).eps / 2
    size = size if values.starts is None else size.T  # as lse lies
    generator = torch.Generator().manual_seed(1)
    left = dict.fromkeys((f"d{name}" for name in leaves), 0.0)
    for _ in range(2):
        signs = torch.randint(0, 2, size.shape, generator=generator).double() * 2 - 1
        kept = torch.where(lse.isfinite(), lse, 0.0)
        found = torch.autograd.grad(
            (size * signs * kept).sum(), list(leaves.values()), retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(leaves, found, strict=True):
            left[f"d{name}"] = max(left[f"d{name}"], _norm(gradient))
    return left


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x[x.isfinite()].double()))


def _repeats(
    op: AttentionOp, spec: AttentionSpec, values: Arguments, call: CallDraw, own: Results, number: int
) -> list[Finding]:
    """A second run gives the same bits: o and lse, decisions of dropout included, and what was asked to repeat.

    Over a cache kernels run on another number of threads.
    """
    if values.held is not None and "cpu" in op.backends:
        torch.set_num_threads(call.threads % 3 + 1)
    again = run(op, spec, values, call)
    settled = tuple(own) if call.deterministic else ("o", "lse")
    return [
        Finding("other bits", f"{name} differs between two runs of the same call", number)
        for name in settled
        if name in own and not _same_bits(own[name], again[name])
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _bytes(
    op: AttentionOp, spec: AttentionSpec, case: Case, values: Arguments, counted: Sequence[Counted], number: int
) -> list[Finding]:
    """Bytes that the emulator counted are those that the plan predicts."""
    if case.machine.backend != "emulator" or case.calls[number].parts:
        return []
    moved = hbm_bytes(op, head_dim_of(spec, case.calls[number]), plain(values.inputs), counted)
    return [
        Finding("bytes", f"{name}: {each.predicted} predicted, {each.counted} counted", number)
        for name, each in moved.items()
        if each.predicted != each.counted
    ]
