"""Whether a case is computed as its spec says: every result, every gradient, repeats, and bytes on the emulator.

In: a ``Case``. Out: a ``Verdict``. What a call gives is found by ``running.py`` and compared by ``comparing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flashgen.diagnostics import SpecError
from flashgen.hosts.emulated import Counted, recording
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.hosts.gpu_calls import has_kernels
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.op.op import AttentionOp
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import CompileFailed
from flashgen.verification.f8 import PHASES
from flashgen.verification.hbm import hbm_bytes
from tools.fuzz.comparing import compare
from tools.fuzz.compiling import compiled
from tools.fuzz.coverage import kinds
from tools.fuzz.draws import CallDraw, Case
from tools.fuzz.inputs import Arguments, arguments, head_dim_of, plain
from tools.fuzz.ranks import Fault, ask
from tools.fuzz.running import Results, calls, is_second, run, second
from tools.fuzz.spread import joined

# Diagnostics by which a spec that the language allows is refused for a target, or that say what no text can tell.
REFUSALS = frozenset({"E205", "E206", "E207", "E211", "E308", "E403", "E404", "E406", "E111", "E604"})


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
        findings = [*_repeats(op, spec, values, call, own, number), *_bytes(op, case, values, counted, number)]
        findings += _as_the_op(op, spec, values, call, own, number) if call.door else []
        ran = kinds(op, spec, call, counted)
        if is_second(call, values):
            own |= second(spec, calls(op, spec, values), values.inputs, values.learned(spec, call.wants), call)
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
    own, told, moved = joined(said, call)
    wrong, borderline = compare(spec, call, values, own, moved=moved)
    findings = [Finding(kind, text, number) for kind, text in told.items()]
    findings += [Finding(f"wrong {name}", text, number) for name, text in wrong.items()]
    return Verdict(tuple(findings), "", len(own), borderline, (f"{call.ranks}{', ragged' if call.lengths else ''}",))


def _rounds_weights(case: Case, spec: AttentionSpec, call: CallDraw) -> bool:
    """Whether kernels multiply weights of 8 bits; of a GPU it is taken to be so, as it may be Hopper's."""
    target = "sm_90a" if case.machine.backend == "cuda" else case.machine.target
    if not call.eight_bits or not target:
        return False
    return has_kernels(EIGHT_BITS, spec, head_dim_of(spec, call), GPUS[target])


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


def _as_the_op(
    op: AttentionOp, spec: AttentionSpec, values: Arguments, call: CallDraw, own: Results, number: int
) -> list[Finding]:
    """What goes through a door is, bit for bit, what the op gives."""
    wanted = run(op, spec, values, replace(call, door=""))
    return [
        Finding(
            f"other bits through {call.door}", f"{name} differs from the op's by {_apart(own[name], x):.1e}", number
        )
        for name, x in wanted.items()
        if not _same_bits(own[name], x)
    ]


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).nan_to_num().abs().max())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _bytes(op: AttentionOp, case: Case, values: Arguments, counted: Sequence[Counted], number: int) -> list[Finding]:
    """Bytes that the emulator counted are those that the plan predicts."""
    if case.machine.backend != "emulator" or case.calls[number].parts:
        return []
    moved = hbm_bytes(op, plain(values.inputs), counted)
    return [
        Finding("bytes", f"{name}: {each.predicted} predicted, {each.counted} counted", number)
        for name, each in moved.items()
        if each.predicted != each.counted
    ]
