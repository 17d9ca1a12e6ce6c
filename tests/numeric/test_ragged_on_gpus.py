"""``op.varlen`` by the kernels for GPUs, on the emulator: each block finds its sequence by itself."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

import flashgen
from flashgen.hosts.emulated import recording
from flashgen.hosts.emulator.program import DeviceMemory, compile_program
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.hosts.standalone import grid
from flashgen.op import lengths, ragged
from flashgen.op.op import AttentionOp
from flashgen.op.ragged import KERNEL, WARPS, arguments
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs

from .helpers import SPECS, dtypes
from .test_ragged import OF_LENGTHS, Batch, batch, check, check_rows_behind, nested, results

# Empty ones, single rows, several tiles, more queries than keys and fewer.
LENGTHS = ((5, 5), (0, 3), (1, 1), (64, 64), (33, 40), (0, 0), (150, 150), (17, 90), (9, 0), (2, 7))
FEW = ((5, 5), (0, 3), (70, 33), (9, 0), (1, 1))


def gallery(name: str, target: str) -> AttentionOp:
    return flashgen.load(SPECS / f"{name}.attn", backend="emulator", target=target)


def emulated(text: str, target: str = "sm_80") -> AttentionOp:
    return flashgen.loads(text, backend="emulator", target=target)


# Sums over pairs, a mask in pieces, sinks and what masks read of captured tensors; wgmma with producers and without.
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bigbird", "sm_80"),
        ("gpt_oss", "sm_90a"),
        pytest.param("relative_bias", "sm_75", marks=pytest.mark.slow),
        pytest.param("bert", "sm_90a", marks=pytest.mark.slow),
    ],
)
def test_of_the_gallery(name: str, target: str) -> None:
    op = gallery(name, target)
    check(op, batch(op, LENGTHS, heads=2, kv_heads=1))
    given = batch(op, FEW, heads=2, kv_heads=1, dtype=TORCH_DTYPES[dtypes(op.spec)[-1]])
    check(op, given, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "name", ["causal", "alibi", "gaussian_regression", "sigmoid_attention", "packed_documents", "exp_kernel", "swin"]
)
def test_more_of_the_gallery(name: str, target: str) -> None:
    op = gallery(name, target)
    for element in dtypes(op.spec):
        given = batch(op, LENGTHS, dtype=TORCH_DTYPES[element])
        check(op, given)
        check(op, given, deterministic=True)


def test_sizes_are_those_of_the_sequence() -> None:
    """Defaults of params and the probability of dropout, too: tables say what they are."""
    op = emulated(OF_LENGTHS)
    given = batch(op, FEW, heads=2)
    check(op, given, seed=7, deterministic=True)
    unlike = {name: x for name, x in given.captured.items() if name not in ("ell", "back", "p")}
    default = Batch(given.q, given.k, given.v, given.starts, unlike, given.d_o, given.d_lse)
    check(op, default, seed=7, deterministic=True)


def test_a_sequence_is_its_dense_call() -> None:
    """The same bits: of O, and of what is dropped by the number of the sequence."""
    op = emulated("attention drops { head_dim 16  mask causal  dropout 0.2 }")
    given = batch(op, LENGTHS, heads=2, kv_heads=1, dtype=torch.bfloat16)
    o, lse = op.varlen(given.q, given.k, given.v, *given.starts, return_lse=True, seed=3)
    for b, (q, k) in enumerate(LENGTHS):
        at, keys = int(given.starts[0][b]), int(given.starts[1][b])
        own = [
            x[first : first + n].transpose(0, 1)[None]
            for x, first, n in ((given.q, at, q), (given.k, keys, k), (given.v, keys, k))
        ]
        one, one_lse = op(*own, return_lse=True, seed=3, b_start=b, b_total=len(LENGTHS))
        assert torch.equal(o[at : at + q], one[0].transpose(0, 1)), b
        assert torch.equal(lse[:, at : at + q], one_lse[0]), b


@pytest.mark.parametrize(("target", "deterministic"), [("sm_80", True), ("sm_90a", False)])
def test_bytes_are_those_of_the_sequences(target: str, deterministic: bool) -> None:
    op = gallery("alibi", target)
    given = batch(op, LENGTHS, heads=2, kv_heads=1, dtype=torch.bfloat16)
    with recording() as counted:
        results(op.varlen, given, op, deterministic=deterministic)
    moved = hbm_bytes(op, Inputs(given.q, given.k, given.v, {}, {}, given.d_o, given.d_lse), counted)
    assert set(moved) == {"forward", "backward"}
    for name, each in moved.items():
        assert each.predicted == each.counted, name


def test_jagged_tensors_through_the_plain_call() -> None:
    op = emulated("attention small { head_dim 16  mask causal }")
    given = batch(op, FEW, heads=2, kv_heads=1)
    q, k, v = (
        nested(x, at) for x, at in ((given.q, given.starts[0]), *((x, given.starts[1]) for x in (given.k, given.v)))
    )
    o, lse = op(q, k, v, return_lse=True)
    rows, sums = op.varlen(given.q, given.k, given.v, *given.starts, return_lse=True)
    assert torch.equal(o.transpose(1, 2).values(), rows)
    assert torch.equal(lse.values(), sums)


def test_views_are_read_where_they_lie() -> None:
    op = emulated("attention small { head_dim 16  mask causal }")
    given = batch(op, FEW, heads=2, kv_heads=1)
    expected = op.varlen(given.q, given.k, given.v, *given.starts)
    wide = torch.zeros(len(given.q), 2, 80)
    for first in (0, 16, 3):  # the last is aligned to nothing, and is copied
        wide[:, :, first : first + 16] = given.q
        headwise = given.k.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(op.varlen(wide[:, :, first : first + 16], headwise, given.v, *given.starts), expected)


# Numbers that no host looked at: kernels stay inside of the tensors, and right sequences stay right.
BAD: dict[str, tuple[int, ...]] = {
    "falls": (0, 20, 5, 60),
    "is negative": (0, -7, 30, 60),
    "ends behind the rows": (0, 20, 900, 2**31 - 1),
    "ends before": (0, 20, 30, 40),
    "begins late": (9, 20, 30, 60),
    "is longer than the longest": (0, 0, 0, 60),
}


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("bad", BAD)
def test_numbers_that_nobody_checked(bad: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = emulated("attention small { head_dim 16  tensor bias: f32[B, Nk] grad  score s + bias[b, j]  mask causal }")
    monkeypatch.setattr(ragged, "lengths", lengths.unseen_lengths)
    q, k = (torch.randn(60, 2, 16, requires_grad=True) for _ in range(2))
    right, wrong = (torch.tensor(each, dtype=torch.int32) for each in ((0, 20, 30, 60), BAD[bad]))
    starts = (wrong if which in ("q", "both") else right, wrong if which in ("k", "both") else right)
    bias = torch.zeros(3, 30, requires_grad=True)
    rest: dict[str, Any] = {"max_seqlen_q": 30, "max_seqlen_k": 30, "bias": bias}
    # Sequences that overlap write the same rows, in an order that nobody knows: the one fault that is left.
    may_race = pytest.raises(EmulatorError, match="global-race") if bad == "falls" else contextlib.nullcontext()
    for deterministic in (False, True):
        with may_race:
            own = op.varlen(q, k, k, *starts, deterministic=deterministic, **rest)
            torch.autograd.grad(own.sum(), (q, k, bias))
    if bad in ("ends behind the rows", "ends before") and which == "q":
        assert torch.equal(own[:20], op.varlen(q, k, k, right, right, **rest)[:20])


def test_rows_behind_the_last_sequence() -> None:
    op = gallery("alibi", "sm_80")
    check_rows_behind(op, batch(op, FEW, heads=2, kv_heads=1))


def test_the_kernel_of_rows_behind() -> None:
    """Of tensors of either size and of any strides; where no row is behind, and where an end is none."""
    program = compile_program(KERNEL.source.text, name="clear_behind")
    o, lse, d_k = torch.ones(50, 3, 40).bfloat16()[:, :, :33], torch.ones(3, 50).t()[:, :, None], torch.ones(7, 2, 5)
    for ends in ((44, 3), (50, 7), (-1, 2**31 - 1)):
        starts = [torch.tensor([0, end], dtype=torch.int32) for end in ends]
        cleared = [(o, starts[0]), (lse, starts[0]), (d_k, starts[1])]
        packed, places, memory = arguments(cleared), [], DeviceMemory()
        for n, (x, start) in enumerate(cleared):
            storage = x.untyped_storage()
            places.append(memory.put(f"x{n}", ctypes.string_at(storage.data_ptr(), storage.nbytes())))
            packed.of[n].at = places[-1]
            packed.of[n].end = memory.put(f"starts{n}", start.numpy().tobytes()) + 4
        program.launch("fg_clear_behind", (grid(WARPS), 1, 1), (256, 1, 1), 0, bytes(packed), memory.allocations)
        for (x, start), place in zip(cleared, places, strict=True):
            bytes_of = ctypes.string_at(place, x.untyped_storage().nbytes())
            whole, end = torch.frombuffer(bytearray(bytes_of), dtype=x.dtype), max(int(start[-1]), 0)
            found = whole.as_strided(x.shape, x.stride())
            assert found[:end].eq(1).all()
            assert not found[end:].any()
            found.fill_(1)
            assert whole.eq(1).all()  # nothing is written beside them


def test_a_sequence_too_large_for_32_bits_is_refused() -> None:
    op = emulated("attention small { head_dim 16  mask causal }")
    q = torch.zeros(2, 1, 16)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"the longest sequence, of up to 200000000 queries .* pass max_seqlen_q"):
        op.varlen(q, q, q, starts, starts, max_seqlen_q=200_000_000, max_seqlen_k=2)


def test_many_sequences() -> None:
    """A warp's lanes look for theirs, in one round, two or three."""
    op = emulated("attention small { head_dim 16  mask causal }")
    check(op, batch(op, [(n % 4, n % 3) for n in range(70)], heads=1, kv_heads=1))
    given = batch(op, [(0, 0) if n % 41 else (3, 3) for n in range(1100)], heads=1, kv_heads=1)
    first = op(*(x[:3].transpose(0, 1)[None] for x in (given.q, given.k, given.v)))[0, 0]
    last = op(*(x[-3:].transpose(0, 1)[None] for x in (given.q, given.k, given.v)))[0, 0]
    o = op.varlen(given.q, given.k, given.v, *given.starts)[:, 0]
    assert torch.equal(o[:3], first)
    assert torch.equal(o[-3:], last)
    assert o.isfinite().all()
