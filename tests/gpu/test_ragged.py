"""``op.varlen`` on a GPU: numbers, graphs that are replayed on other lengths, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from tests.gpu.helpers import REPRESENTATIVE, capturing, operator
from tests.numeric.helpers import dtypes
from tests.numeric.test_ragged import MIXED, Batch, batch, check, followed, nested, results

cuda: Any = torch.cuda


def on_gpu(given: Batch) -> Batch:
    captured = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.captured.items()}
    q_starts, k_starts = (x.cuda() for x in given.starts)
    q, k, v, d_o, d_lse = (x.cuda() for x in (given.q, given.k, given.v, given.d_o, given.d_lse))
    return Batch(q, k, v, (q_starts, k_starts), captured, d_o, d_lse)


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "relative_bias", "bigbird", "gaussian_regression"])
def test_of_the_gallery(name: str) -> None:
    op = operator(name)
    for element in dtypes(op.spec):
        seeds = range(6 if any(param.grad for param in op.spec.params) else 1)
        given = [on_gpu(batch(op, dtype=TORCH_DTYPES[element], seed=seed)) for seed in seeds]
        check(op, *given)
        check(op, *given, deterministic=True)


def test_a_giant_beside_a_thousand_small_ones() -> None:
    op = operator("causal")
    lengths = ((4000, 4000), *((n % 7, n % 5) for n in range(1000)))
    check(op, on_gpu(batch(op, lengths, dtype=torch.bfloat16)))


@pytest.mark.parametrize("name", ["causal", "alibi"])
def test_no_number_of_a_neighbour(name: str) -> None:
    """NaN in some sequences changes no bit of o, dk and dv of the others."""
    op = operator(name)
    lengths, spoiled = [(n, n) for n in (130, 5, 257, 64, 1, 700)], (1, 3, 5)
    found = []
    for nan in (False, True):
        given = on_gpu(batch(op, lengths, dtype=torch.bfloat16))
        for x, starts in ((given.q, 0), (given.k, 1), (given.v, 1), (given.d_o, 0)):
            for n in spoiled if nan else ():
                x[given.starts[starts][n] : given.starts[starts][n + 1]] = torch.nan
        leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
        captured: dict[str, Any] = {
            key: x.detach() if isinstance(x, Tensor) else x for key, x in given.captured.items()
        }
        o = op.varlen(leaves[0], leaves[1], leaves[2], *given.starts, **captured)
        _, dk, dv = torch.autograd.grad(o, leaves, given.d_o)
        found.append((o.detach(), dk, dv))
    for n in set(range(len(lengths))) - set(spoiled):
        begin, end = sum(a for a, _ in lengths[:n]), sum(a for a, _ in lengths[: n + 1])
        for clean, beside in zip(*found, strict=True):
            assert torch.equal(clean[begin:end], beside[begin:end])


def test_repeatable() -> None:
    op = operator("alibi")
    given = on_gpu(batch(op, dtype=torch.bfloat16))
    first, second = (results(op.varlen, given, op, deterministic=True) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_a_graph_takes_other_lengths() -> None:
    """Forward and backward captured once; cu_seqlens change in place, the number of sequences and of rows does not."""
    op = operator("causal")
    batches = ((100, 5, 0, 300), (1, 200, 201, 3), (405, 0, 0, 0))
    given = on_gpu(batch(op, [(n, n) for n in batches[0]], dtype=torch.bfloat16))
    starts = given.starts[0].clone()
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))

    def step() -> tuple[Tensor, ...]:
        o = op.varlen(q, k, v, starts, starts, deterministic=True)
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), given.d_o))

    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):
        for _ in range(3):
            step()
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = step()
    for lengths in batches:
        starts.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        torch.cuda.synchronize()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)


def test_what_has_to_know_lengths_is_refused_in_a_graph() -> None:
    op = flashgen.loads("attention own { head_dim 64  param ell: f32 = 1 / Nk  score ell * s }", backend="cuda")
    q, starts = torch.randn(8, 1, 64, device="cuda"), i32(0, 3, 8)
    op.varlen(q, q, q, starts, starts)
    with pytest.raises(ValueError, match="'ell' follows from the lengths"), capturing(q):
        op.varlen(q, q, q, starts, starts)


def test_a_call_does_not_wait() -> None:
    op = operator("causal")
    given = on_gpu(batch(op, dtype=torch.bfloat16))
    results(op.varlen, given, op)
    torch.cuda.synchronize()
    cuda._sleep(1_000_000_000)  # about half a second
    done = cuda.Event()
    results(op.varlen, given, op)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def bad_starts(op: AttentionOp, starts: Tensor) -> None:
    q = torch.randn(60, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    right = i32(0, 20, 30, 60)
    for own in ((starts, right), (right, starts), (starts, starts)):
        o = op.varlen(q, q, q, *own)
        torch.autograd.grad(o.float().nan_to_num().sum(), q)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "numbers", [(0, 20, 5, 60), (0, -7, 30, 60), (0, 20, 900, 2**31 - 1), (0, 20, 30, 40), (9, 20, 30, 60)]
)
def test_numbers_that_nobody_checked(numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read or written outside of tensors: the device goes on working. Asked to, the host names them."""
    op = operator("causal")
    bad_starts(op, i32(*numbers))
    monkeypatch.setenv("FLASHGEN_CHECK_LENGTHS", "1")
    if numbers[-1] < 60 and sorted(numbers) == [*numbers]:
        bad_starts(op, i32(*numbers))  # rows behind the last sequence
        return
    with pytest.raises(ValueError, match="'cu_seqlens_q'"):
        bad_starts(op, i32(*numbers))


@pytest.mark.parametrize("name", ["causal", "alibi"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_behind_the_last_sequence(name: str, deterministic: bool) -> None:
    """o, lse and gradients of them are 0, in memory that held NaN; the host does not wait for where they begin."""
    op = operator(name)
    given = on_gpu(batch(op, MIXED, dtype=torch.bfloat16))
    wanted = results(op.varlen, given, op, deterministic=deterministic)
    behind = followed(given, 70)
    held = [torch.full_like(x, torch.nan) for x in (behind.q, behind.k, behind.v, behind.q, behind.d_lse)]
    del held
    found = results(op.varlen, behind, op, deterministic=deterministic)
    for key, x in wanted.items():
        axis, own = 1 if key == "lse" else 0, found[key]
        rows = own if own.shape == x.shape else own.narrow(axis, 0, x.shape[axis])
        torch.testing.assert_close(rows, x, rtol=1e-2, atol=1e-2)
        assert own.shape == x.shape or not own.narrow(axis, x.shape[axis], 70).any()


def test_jagged_tensors_through_the_plain_call() -> None:
    op = operator("causal")
    given = on_gpu(batch(op, MIXED, dtype=torch.bfloat16))
    q, k, v = nested(given.q, given.starts[0]), nested(given.k, given.starts[1]), nested(given.v, given.starts[1])
    o, lse = op(q, k, v, return_lse=True)
    rows, sums = op.varlen(given.q, given.k, given.v, *given.starts, return_lse=True)
    assert torch.equal(o.transpose(1, 2).values(), rows)
    assert torch.equal(lse.values(), sums)
