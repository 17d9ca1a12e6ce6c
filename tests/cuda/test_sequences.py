"""How kernels for ragged batches find their sequences: planted mistakes show, and dense ones have none of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.hosts.emulator.program import Program, compile_program
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.ragged import RAGGED
from flashgen.op import lengths, ragged
from flashgen.op.op import AttentionOp, OpParts
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import relative_error
from tests.cuda.helpers import planted_kernel

TEXT = """
attention planted {
    head_dim 16
    dtype f32
    tensor slope: f32[B] grad
    tensor short: i32[B, Nk]
    score s - slope[b] * (Nq - i) * (Nk + j) / 4000
    mask short[b, j] > 0 and i - j < 70
}
"""
LENGTHS = ((20, 20), (0, 3), (1, 90), (100, 70), (3, 0), (17, 17))
# What is planted: a text of the source and what stands in its place.
MISTAKES = {
    "two sequences share a tile": ("int(unsigned(begin) / tile) + sequence", "int(unsigned(begin) / tile)"),
    "the last of equal begins": (", first + own) <= place", ", first + own) < place"),
    "keys of the next one": ("begin_of(call.k_starts, kv_rows, n);", "begin_of(call.k_starts, kv_rows, n + 1);"),
    "as many keys as queries": (
        "s.kv_count = fg::max(begin_of(call.k_starts, kv_rows, n + 1) - s.kv_begin, 0)",
        "s.kv_count = s.q_count",
    ),
    "the first sequence's b": ("a.b_start = call.b_start + n", "a.b_start = call.b_start"),
    "Nq of all": ("a.q_total = a.q_len", "a.q_total = call.q_len"),
    "O of the call's first rows": ("fg::moved<T>(call.o, a.q_begin * call.o_stride_n)", "call.o"),
    "O as one head's rows": (
        "return {row_of_o<T>(a, b, h, n), a.o_stride_n};",
        "return {row_of_o<T>(a, b, h, n), 16};",
    ),
    "lse as of a dense call": ("return a.q_rows;", "return a.q_len;"),
    "ranges of another's keys": ("+ a.heads * first_tile<16>(a.kv_begin, a.sequence) * 1", ""),
}
OF_THE_BACKWARD_PASS = {
    "delta of another sequence": (" + a.q_begin;", ";"),
    "sums of dQ of another sequence": ("a.heads * first_tile<16>(a.q_begin, a.sequence) * 256", "0"),
    "dK as one head's rows": (
        "return {row_of_dk<T>(a, b, h, n), a.dk_stride_n};",
        "return {row_of_dk<T>(a, b, h, n), 16};",
    ),
    "delta of a head's first row": ("h * rows_apart(a) + i}", "h * rows_apart(a)}"),
}
# With a sink the kernel of delta has to know of sequences, too.
WITH_SINK = TEXT.replace("planted", "planted_sink").replace(
    "    mask", "    weights softmax(sink = slope[b])\n    mask"
)
OF_SINKS = {
    "d(lse) of the call's first rows": ("fg::moved<float>(call.d_lse, a.q_begin * 1)", "call.d_lse"),
    "O of another sequence": ("fg::moved<T>(call.o, a.q_begin * call.o_stride_n)", "call.o"),
}


@functools.cache
def emitted(text: str = TEXT, target: str = "sm_80") -> tuple[AttentionSpec, CompiledKernel[Any, Any]]:
    spec = flashgen.loads(text, backend="reference").spec
    return spec, compiled(kernel_variant(spec, spec.head_dims[0], RAGGED), GPUS[target])


def changed(name: str, *changes: tuple[str, str], of: str = TEXT, target: str = "sm_80") -> AttentionOp:
    """The op with changes in the text of its kernels, each in one place."""
    spec, kernel = emitted(of, target)
    text = kernel.source.whole
    for old, new in changes:
        assert squeezed(text).count(squeezed(old)) == 1, old
        text = planted(text, old, new)

    @functools.cache
    def program(_: Any, kernels: frozenset[str]) -> Program:
        return compile_program(text, name=kernel.source.name, kernels=kernels)

    own = planted_kernel(kernel.plan, program)
    dense = replace(own, other=lambda _: own)
    return AttentionOp(OpParts(replace(spec, name=name), {"cpu": lambda *_: dense}, backend="emulator"))


def squeezed(text: str) -> str:
    return "".join(text.split())


def planted(text: str, old: str, new: str) -> str:
    """The text with one piece of it replaced, wherever its lines are broken."""
    places = [at for at, letter in enumerate(text) if not letter.isspace()]
    first = squeezed(text).index(squeezed(old))
    return text[: places[first]] + new + text[places[first + len(squeezed(old)) - 1] + 1 :]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors(op: AttentionOp, *, backward: bool) -> list[float]:
    q_rows, k_rows = (sum(each) for each in zip(*LENGTHS, strict=True))
    q_starts, k_starts = (torch.tensor([0, *each]).cumsum(0).int() for each in zip(*LENGTHS, strict=True))
    q, k, v = random(q_rows, 2, 16, seed=0), random(k_rows, 2, 16, seed=1), random(k_rows, 2, 16, seed=2)
    slope, d_o, d_lse = random(len(LENGTHS), seed=3), random(q_rows, 2, 16, seed=4), random(2, q_rows, seed=5)
    short = torch.arange(90).expand(len(LENGTHS), 90) % 45 < torch.arange(10, 40, 5)[:, None]
    found: list[list[Tensor]] = []
    for function in (op.varlen, op.reference.varlen):
        leaves = [x.clone().requires_grad_(backward) for x in (q, k, v, slope)]
        rows = (leaves[0], leaves[1], leaves[2], q_starts, k_starts)
        o, lse = function(*rows, slope=leaves[3], short=short.int(), return_lse=True)
        results = [o.detach(), lse.detach()]
        if backward:
            arriving = (d_o.to(o.dtype), torch.where(lse.isfinite(), d_lse.to(lse.dtype), 0))
            results += torch.autograd.grad((o, lse), leaves, arriving)
        found.append(results)
    return [relative_error(own, exact) for own, exact in zip(*found, strict=True)]


def shows(op: AttentionOp, *, backward: bool) -> bool:
    """Whether the emulator says so, or results do."""
    try:
        return max(errors(op, backward=backward)) > 1e-3
    except EmulatorError:
        return True


@pytest.mark.parametrize("backward", [False, True])
def test_without_a_mistake_all_is_right(backward: bool) -> None:
    assert max(errors(changed("planted_nothing"), backward=backward)) < 1e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_both_passes_show(mistake: str) -> None:
    op = changed(f"planted_sequence_{list(MISTAKES).index(mistake)}", MISTAKES[mistake])
    assert shows(op, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", OF_THE_BACKWARD_PASS)
def test_mistakes_of_the_backward_pass_show(mistake: str) -> None:
    op = changed(f"planted_backwards_{list(OF_THE_BACKWARD_PASS).index(mistake)}", OF_THE_BACKWARD_PASS[mistake])
    assert shows(op, backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, *OF_SINKS])
def test_mistakes_of_sinks_show(mistake: str | None) -> None:
    change = [] if mistake is None else [OF_SINKS[mistake]]
    op = changed(f"planted_sinks_{[None, *OF_SINKS].index(mistake)}", *change, of=WITH_SINK)
    assert shows(op, backward=True) is (mistake is not None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return begin < 0 ? 0 : begin < rows ? begin : rows;", "return begin;"),
        ("s.kv_count = fg::min(s.kv_count, int(call.kv_most))", "s.kv_count += 0"),
    ],
)
def test_what_keeps_kernels_inside_is_needed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has checked cu_seqlens."""
    monkeypatch.setattr(ragged, "lengths", lengths.unseen_lengths)
    op = changed(f"planted_bound_{len(new)}", (old, new))
    q, starts = random(60, 2, 16, seed=0), torch.tensor([0, 55, 90, 60], dtype=torch.int32)
    if "most" in old:
        starts = torch.tensor([0, 0, 0, 60], dtype=torch.int32)
    short = torch.ones(3, 20, dtype=torch.int32)
    with pytest.raises(EmulatorError):
        op.varlen(q, q, q, starts, starts, 20, 20, slope=torch.zeros(3), short=short)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_dense_kernels_know_of_no_sequences(target: str) -> None:
    spec, _ = emitted()
    dense = compiled(kernel_variant(spec, spec.head_dims[0]), GPUS[target]).source.text
    assert not any(word in dense for word in ("q_starts", "sequence_of", "kv_rows", "struct Call", "ragged = true"))
