"""Algorithms 0 to 5 and FlashAttention-2's order, for every spec of the gallery, against the dense formula.

Theorem 1 and its like for the backward pass: the results are exact. Both sides compute in float64, and dropout decides
by the same generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.language import parse_file, parse_text
from flashgen.reference.dense import Dropout, attention
from flashgen.reference.shard import Shard
from flashgen.verification import fitting
from flashgen.verification.inputs import Inputs, random_inputs
from flashgen.verification.verify import relative_error
from tests.numeric.helpers import GALLERY, SMALL_CONSTANTS, SPECS
from tools.paper import (
    Backward,
    BlockSizes,
    Problem,
    algorithm_0,
    algorithm_1,
    algorithm_2,
    algorithm_3,
    algorithm_4,
    algorithm_5,
    flash2_backward,
    flash2_forward,
    kept_blocks,
    rabe_staats_backward,
    rabe_staats_blocks,
    rabe_staats_forward,
)
from tools.paper.pairs import captured_names, given_tensor

BLOCKS = BlockSizes(4, 5)
EXACT = 1e-12
SHAPE = Shape(1, 2, 1, 9, 13)
DROPOUT = Dropout(0.3, 1234)


@dataclass(frozen=True)
class Truth:
    """The problem, the arriving gradients, and the dense results."""

    problem: Problem
    d_o: Tensor
    d_lse: Tensor | None
    o: Tensor
    lse: Tensor | None
    gradients: dict[str, Tensor]


@functools.cache
def gallery_truth(name: str) -> Truth:
    spec = parse_file(SPECS / f"{name}.attn", SMALL_CONSTANTS.get(name, {})).specs[0]
    head_dim = HeadDim(6, 4) if spec.head_dims[0].qk != spec.head_dims[0].v else HeadDim(6, 6)
    return truth(spec, SHAPE, head_dim)


def truth(spec: AttentionSpec, shape: Shape, head_dim: HeadDim, shard: Shard | None = None) -> Truth:
    shape = fitting(spec, shape)
    inputs = random_inputs(spec, shape, head_dim, torch.float64, seed=len(spec.name))
    shard = shard or Shard.whole(inputs.q.shape, inputs.k.shape)
    captured = {name: _wide(value) for name, value in inputs.captured.items()}
    params = {name: _wide(value) if isinstance(value, Tensor) else value for name, value in inputs.params.items()}
    problem = Problem(spec, inputs.q, inputs.k, inputs.v, captured, params, shard, DROPOUT)
    return dense_truth(problem, inputs)


def dense_truth(problem: Problem, inputs: Inputs) -> Truth:
    spec = problem.spec
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v}
    for name in captured_names(problem):
        leaves[name] = given_tensor(problem, name)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    o, lse = attention(
        spec,
        *(leaves[name] for name in ("q", "k", "v")),
        tensors={name: leaves.get(name, value) for name, value in problem.tensors.items()},
        params={name: leaves.get(name, value) for name, value in problem.params.items()},
        shard=problem.shard,
        dropout=problem.dropout,
    )
    outputs, arriving = [o], [inputs.d_o]
    d_lse = None
    if lse is not None:
        d_lse = inputs.d_lse.double()
        outputs.append(lse)
        arriving.append(d_lse)
    found = torch.autograd.grad(outputs, list(leaves.values()), arriving, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    return Truth(problem, inputs.d_o, d_lse, o.detach(), None if lse is None else lse.detach(), gradients)


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def same_forward(o: Tensor, lse: Tensor | None, expected: Truth) -> None:
    assert relative_error(o, expected.o) < EXACT
    assert (lse is None) == (expected.lse is None)
    if lse is not None and expected.lse is not None:
        assert relative_error(lse, expected.lse) < EXACT


def same_backward(found: Backward, expected: Truth) -> None:
    gradients = {"q": found.dq, "k": found.dk, "v": found.dv, **found.captured}
    assert gradients.keys() == expected.gradients.keys()
    errors = {name: relative_error(gradients[name], expected.gradients[name]) for name in gradients}
    assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("name", GALLERY)
def test_standard_attention(name: str) -> None:
    expected = gallery_truth(name)
    for blocks in (None, BLOCKS):
        forward = algorithm_0(expected.problem, blocks)
        same_forward(forward.o, forward.lse, expected)
    same_backward(algorithm_3(forward, expected.d_o, expected.d_lse, BLOCKS), expected)


@pytest.mark.parametrize("name", GALLERY)
def test_flash_attention(name: str) -> None:
    expected = gallery_truth(name)
    forward = algorithm_2(expected.problem, BLOCKS)
    same_forward(forward.o, forward.lse, expected)
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, BLOCKS), expected)


@pytest.mark.parametrize("name", GALLERY)
def test_blocks_without_pairs_are_left_out(name: str) -> None:
    """Algorithm 5; its backward pass and FlashAttention-2 leave the same blocks out."""
    expected = gallery_truth(name)
    kept = kept_blocks(expected.problem, BLOCKS)
    forward = algorithm_5(expected.problem, BLOCKS)
    same_forward(forward.o, forward.lse, expected)
    assert forward.hbm.loads["Q"] == 6 * _rows_visited(kept, expected.problem)
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, BLOCKS, kept), expected)


@pytest.mark.parametrize("name", GALLERY)
def test_flash_attention_2(name: str) -> None:
    expected = gallery_truth(name)
    kept = kept_blocks(expected.problem, BLOCKS)
    forward = flash2_forward(expected.problem, BLOCKS, kept)
    same_forward(forward.o, forward.lse, expected)
    same_backward(flash2_backward(forward, expected.d_o, expected.d_lse, BLOCKS, kept), expected)
    # The results of one order go into the backward pass of the other.
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, BLOCKS), expected)


@pytest.mark.parametrize("name", GALLERY)
def test_rabe_and_staats(name: str) -> None:
    expected = gallery_truth(name)
    for blocks in (BLOCKS, rabe_staats_blocks(expected.problem.shard.q_len, expected.problem.shard.kv_len)):
        forward = rabe_staats_forward(expected.problem, blocks)
        same_forward(forward.o, forward.lse, expected)
        same_backward(rabe_staats_backward(forward, expected.d_o, expected.d_lse, blocks), expected)
    # FlashAttention's backward pass goes on from there.
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, BLOCKS), expected)


def _rows_visited(kept: Tensor, problem: Problem) -> int:
    lengths = [min(BLOCKS.Br, problem.shard.q_len - first) for first in range(0, problem.shard.q_len, BLOCKS.Br)]
    return int((kept.sum(-1) * torch.tensor(lengths)).sum())


@pytest.mark.parametrize("blocks", [(1, 1), (9, 13), (64, 2), (2, 64)], ids=str)
def test_any_block_sizes(blocks: tuple[int, int]) -> None:
    expected, sizes = gallery_truth("gpt_oss"), BlockSizes(*blocks)
    forward = algorithm_2(expected.problem, sizes)
    same_forward(forward.o, forward.lse, expected)
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, sizes), expected)
    second = flash2_forward(expected.problem, sizes)
    same_forward(second.o, second.lse, expected)
    standard = algorithm_0(expected.problem, sizes)
    same_backward(algorithm_3(standard, expected.d_o, expected.d_lse, sizes), expected)
    chunks = rabe_staats_forward(expected.problem, sizes)
    same_forward(chunks.o, chunks.lse, expected)
    same_backward(rabe_staats_backward(chunks, expected.d_o, expected.d_lse, sizes), expected)


def test_algorithm_1_is_algorithm_2_without_dropout() -> None:
    problem = replace(gallery_truth("causal").problem, dropout=None)
    one, two = algorithm_1(problem, BLOCKS), algorithm_2(problem, BLOCKS)
    assert torch.equal(one.o, two.o)
    assert one.hbm.by_name == two.hbm.by_name
    with pytest.raises(ValueError, match="no dropout"):
        algorithm_1(gallery_truth("causal").problem, BLOCKS)


RUNS: tuple[Callable[[Problem, BlockSizes], Tensor], ...] = (
    lambda problem, blocks: algorithm_0(problem, blocks).o,
    lambda problem, blocks: algorithm_2(problem, blocks).o,
    lambda problem, blocks: algorithm_5(problem, blocks).o,
    lambda problem, blocks: flash2_forward(problem, blocks).o,
    lambda problem, blocks: rabe_staats_forward(problem, blocks).o,
)


def test_a_shard_computes_its_part_of_the_whole() -> None:
    """Global positions, totals and dropout: rows 9 to 17 of 20 over keys 4 to 16 of 40, heads 2 and 3 of 6."""
    spec = parse_text(
        "attention t { head_dim 6 tensor slope: f32[H] grad tensor doc: i32[B, Nk]"
        " score s - slope[h] * (i - j) / Nk mask j <= i + 5 and doc[b, i] >= doc[b, j] }"
    ).specs[0]
    shard = Shard(1, 2, 1, 9, 13, b_start=1, h_start=2, q_start=9, kv_start=4, h_total=6, q_total=20, kv_total=40)
    inputs = random_inputs(spec, Shape(2, 6, 3, 20, 40), HeadDim(6, 6), torch.float64, seed=3)
    q, k, v = inputs.q[1:, 2:4, 9:18], inputs.k[1:, 1:2, 4:17], inputs.v[1:, 1:2, 4:17]
    captured = {name: _wide(value) for name, value in inputs.captured.items()}
    problem = Problem(spec, q, k, v, captured, {}, shard, DROPOUT)
    cut = replace(inputs, q=q, k=k, v=v, d_o=inputs.d_o[1:, 2:4, 9:18], d_lse=inputs.d_lse[1:, 2:4, 9:18])
    expected = dense_truth(problem, cut)
    for run in RUNS:
        assert relative_error(run(problem, BLOCKS), expected.o) < EXACT
    forward = algorithm_2(problem, BLOCKS)
    same_backward(algorithm_4(forward, expected.d_o, expected.d_lse, BLOCKS), expected)


@pytest.mark.parametrize("shape", [(1, 2, 2, 0, 5), (1, 2, 2, 5, 0), (0, 2, 2, 4, 4), (1, 0, 0, 4, 4)], ids=str)
def test_nothing_to_attend_to(shape: tuple[int, int, int, int, int]) -> None:
    spec = parse_text("attention t { head_dim 6 mask causal }").specs[0]
    B, H, Hkv, Nq, Nk = shape
    q, k, v = (torch.randn(B, h, n, 6, dtype=torch.float64) for h, n in ((H, Nq), (Hkv, Nk), (Hkv, Nk)))
    problem = Problem(spec, q, k, v, {}, {}, Shard.whole(q.shape, k.shape))
    for run in RUNS:
        assert torch.equal(run(problem, BLOCKS), torch.zeros(B, H, Nq, 6, dtype=torch.float64))


def test_blocks_hold_something() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        BlockSizes(0, 4)
