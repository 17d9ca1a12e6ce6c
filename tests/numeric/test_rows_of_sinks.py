"""Of a row that keeps no key the sink is the whole denominator: lse is the sink, its gradient there 1, o is 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from tests.numeric.helpers import assert_close, normal
from tests.slices import one_of

BACKENDS = [("cpu", None), ("emulator", "sm_90a"), ("emulator", "sm_80")]
HEAD = "attention sunk { head_dim 64 tensor z: f32[H] grad weights softmax(sink = z[h]) mask causal_lower_right"
SINKS = {"usual": (0.5, -1.0), "far": (-200.0, 120.0), "endless": (1e30, -1e30)}


def loaded(statements: str, backend: str | None, target: str | None) -> AttentionOp:
    return flashgen.loads(f"{HEAD} {statements} }}", backend=backend, target=target)


def check(op: Any, truth: Any, tensors: list[Tensor], sinks: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """o, lse and every gradient, where something arrives at both; lse of the formula."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors] + [torch.tensor(sinks, requires_grad=True)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    (o, lse), (exact, exact_lse) = op(*leaves), truth(*exact_leaves)
    d_o, d_lse = normal(*o.shape, seed=5).to(dtype), normal(*lse.shape, seed=6)
    found = (o, lse, *torch.autograd.grad((o, lse), leaves, (d_o, d_lse)))
    arriving = (d_o.double(), d_lse.double())
    wanted = (exact, exact_lse, *torch.autograd.grad((exact, exact_lse), exact_leaves, arriving))
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv", "dz"), found, wanted, strict=True):
        if y.norm() > 1e-30:  # else float32 has none of it
            assert_close(x, y, 1e-2 if dtype is torch.bfloat16 and name != "lse" else 2e-5, name)
    rows: Tensor = exact_lse.detach()
    return rows


@pytest.mark.parametrize(("backend", "target"), [*BACKENDS[:2], pytest.param(*BACKENDS[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("statements", ["", pytest.param("score softcap(s, 20)", marks=pytest.mark.slow)])
def test_dense_rows(statements: str, backend: str, target: str | None) -> None:
    op = loaded(statements, backend, target)

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Any:
        return op(q, k, v, z=z, return_lse=True)

    def exact(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Any:
        return op.reference(q, k, v, z=z, dtype=torch.float64, return_lse=True)

    for keys in (13, 0):
        tensors = [normal(1, 2, rows, 64, seed=seed) for seed, rows in enumerate((70, keys, keys))]
        for name, sinks in SINKS.items():
            for dtype in (torch.float32, torch.bfloat16) if name == "usual" else (torch.float32,):
                lse = check(attend, exact, tensors, sinks, dtype)
                assert torch.equal(lse[0, :, : 70 - keys], torch.tensor(sinks).double()[:, None].expand(2, 70 - keys))


def in_tiles(rows: int) -> tuple[Callable[[int], Tensor], Tensor, Tensor]:
    """Sequences with few keys or none, and one without queries."""
    lengths = ((rows, 7), (3, 0), (5, 9), (0, 4), (40, 64))
    starts = [torch.tensor([0, *(each[n] for each in lengths)]).cumsum(0).int() for n in range(2)]
    return (lambda n: normal(int(starts[min(n, 1)][-1]), 2, 64, seed=n)), starts[0], starts[1]


@pytest.mark.parametrize(("backend", "target"), one_of(3, BACKENDS[::-1]))
def test_rows_of_ragged_batches(backend: str, target: str | None) -> None:
    op = loaded("", backend, target)
    of, q_starts, k_starts = in_tiles(40)
    nothing = torch.zeros_like(k_starts)
    for starts, tensors in (
        (k_starts, [of(0), of(1), of(2)]),
        (nothing, [of(0), of(1)[:0], of(2)[:0]]),
    ):

        def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor, starts: Tensor = starts) -> Any:
            return op.varlen(q, k, v, q_starts, starts, z=z, return_lse=True)

        def exact(q: Tensor, k: Tensor, v: Tensor, z: Tensor, starts: Tensor = starts) -> Any:
            return op.reference.varlen(q, k, v, q_starts, starts, z=z, return_lse=True)

        check(attend, exact, tensors, SINKS["usual"], torch.float32)


@pytest.mark.parametrize(("backend", "target"), one_of(3, BACKENDS))
def test_rows_of_caches(backend: str, target: str | None) -> None:
    """Padding leaves rows without keys; of some sequences it is all, whose parts are empty, too."""
    op, z = loaded("", backend, target), torch.tensor(SINKS["usual"])
    k, v = normal(3, 2, 300, 64), normal(3, 2, 300, 64, seed=1)
    lengths, padding = torch.tensor([7, 8, 300]), torch.tensor([7, 3, 280])
    for rows, splits in ((1, 0), (1, 3), (6, 1)):
        q = normal(3, 2, rows, 64, seed=2)
        o, lse = op.decode(q, k, v, lengths, leftpad=padding, num_splits=splits, z=z, return_lse=True)
        exact, exact_lse = op.reference.decode(q, k, v, lengths, leftpad=padding, z=z, return_lse=True)
        assert_close(o, exact, what="o")
        assert_close(lse, exact_lse, what="lse")
        assert torch.equal(lse[0], z[:, None].expand(2, rows))
    nothing = torch.tensor([7, 8, 300])
    o, lse = op.decode(q, k, v, lengths, leftpad=nothing, z=z, return_lse=True)
    assert not o.any()
    assert torch.equal(lse, z.view(1, 2, 1).expand(3, 2, 6))


@pytest.mark.parametrize("keys", one_of(2, [13, 0]))
@pytest.mark.parametrize(("backend", "target"), one_of(3, BACKENDS))
def test_tangents_of_rows(keys: int, backend: str, target: str | None) -> None:
    """lse changes by what the sink does; and so does what tangents are differentiated by."""
    op = loaded("", backend, target)
    given = [*(normal(1, 2, rows, 64, seed=n) for n, rows in enumerate((40, keys, keys))), torch.tensor((0.5, -1.0))]
    moves = [normal(*x.shape, seed=9 + n) for n, x in enumerate(given)]

    def results(call: Any, dtype: torch.dtype) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = call(q, k, v, z=z, return_lse=True)
            return found

        def moved(*x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            found: Any = torch.func.jvp(attend, x, tuple(each.to(dtype) for each in moves))[1]
            return (found[0] * 1.3).sum() + (found[1] * torch.linspace(0, 1, 40)).sum(), found

        x = tuple(each.to(dtype) for each in given)
        gradients, found = torch.func.grad(moved, argnums=(0, 1, 2, 3), has_aux=True)(*x)
        return [*found, *gradients]

    truth = results(op.reference, torch.float64)
    assert torch.equal(truth[1][0, :, : 40 - keys], moves[3].double()[:, None].expand(2, 40 - keys))
    for x, y in zip(results(op, torch.float32), truth, strict=True):
        assert_close(x, y, 1e-4)
