"""The example with n = 4, d = 2 and blocks of 2, every step of Algorithm 1 worked out by hand."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

from flashgen.language import parse_text
from flashgen.reference.shard import Shard
from tools.paper import BlockSizes, Problem, Step, algorithm_0, algorithm_1, flash2_forward

Q = ((1, 0), (0, 1), (2, 1), (1, 2))
K = ((1, 1), (0, 2), (1, 0), (2, 1))
V = ((1, 0), (0, 1), (2, 1), (1, 2))

# S = QKᵀ, block by block: rows 1-2 and 3-4, keys 1-2 and 3-4.
#     1 0 | 1 2
#     1 2 | 0 1
#     ----+----
#     3 2 | 2 5
#     3 4 | 1 4
A, B, C = exp(-1), exp(-2), exp(-3)
STEPS = (
    # (i, j), m, ℓ, ℓ · O: all after the block
    ((1, 1), (1, 2), (1 + A, 1 + A), ((1, A), (A, 1))),
    ((2, 1), (3, 4), (1 + A, 1 + A), ((1, A), (A, 1))),
    ((1, 2), (2, 2), ((1 + A) ** 2, (1 + A) ** 2), ((1 + 3 * A, 2 + A + B), (2 * A + 2 * B, 1 + 2 * A + B))),
    ((2, 2), (5, 4), (1 + B + 2 * C, 2 + A + C), ((1 + B + 2 * C, 2 + 2 * C), (1 + A + 2 * C, 3 + C))),
)


def example() -> Problem:
    spec = parse_text("attention example { head_dim 2 scale 1 }").specs[0]
    q, k, v = (torch.tensor(matrix, dtype=torch.float64)[None, None] for matrix in (Q, K, V))
    return Problem(spec, q, k, v, {}, {}, Shard.whole(q.shape, k.shape))


def same(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_every_step() -> None:
    seen: list[Step] = []
    algorithm_1(example(), BlockSizes(2, 2), seen.append)
    assert len(seen) == len(STEPS)
    for step, ((i, j), m, ell, scaled) in zip(seen, STEPS, strict=True):
        assert (step.place.rows, step.place.columns) == (slice(2 * i - 2, 2 * i), slice(2 * j - 2, 2 * j))
        same(step.row.m, m)
        same(step.row.ell, ell)
        same(step.O, [[value / total for value in row] for row, total in zip(scaled, ell, strict=True)])


def test_the_result_is_that_of_standard_attention() -> None:
    problem = example()
    expected = torch.softmax(problem.q @ problem.k.mT, -1) @ problem.v
    for o in (
        algorithm_0(problem).o,
        algorithm_1(problem, BlockSizes(2, 2)).o,
        flash2_forward(problem, BlockSizes(2, 2)).o,
    ):
        torch.testing.assert_close(o, expected, rtol=1e-14, atol=0)


def test_what_was_moved() -> None:
    """N = 4, d = 2, T_c = 2: K and V once; Q, O, ℓ and m for both blocks of keys, O, ℓ and m initialised before."""
    hbm = algorithm_1(example(), BlockSizes(2, 2)).hbm
    assert hbm.loads == {"K": 8, "V": 8, "Q": 16, "O": 16, "m": 8, "ell": 8}
    assert hbm.stores == {"O": 8 + 16, "m": 4 + 8, "ell": 4 + 8}
    assert hbm.extra == 8
