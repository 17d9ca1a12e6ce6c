"""The paper's theorems as counts: what the algorithms move through the HBM, against N, d, M and s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashgen.language import parse_text
from flashgen.plan import paper
from flashgen.plan.paper import BlockSizes, Lengths, paper_blocks
from flashgen.reference.shard import Shard
from flashgen.targets.gpu.bytes import bytes_of_call
from flashgen.targets.gpu.launches import forward_launches
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import planned
from tools.paper import (
    Backward,
    Forward,
    Problem,
    Standard,
    algorithm_0,
    algorithm_1,
    algorithm_3,
    algorithm_4,
    algorithm_5,
    flash2_backward,
    flash2_forward,
    forms,
    kept_blocks,
    rabe_staats_backward,
    rabe_staats_blocks,
    rabe_staats_forward,
)


def plain(
    N: int, d: int, *, heads: int = 1, kv_heads: int = 1, Nk: int | None = None, dv: int | None = None
) -> Problem:
    spec = parse_text(f"attention plain {{ head_dim {d} }}").specs[0]
    q, k = torch.randn(1, heads, N, d), torch.randn(1, kv_heads, Nk or N, d)
    v = torch.randn(1, kv_heads, Nk or N, dv or d)
    return Problem(spec, q, k, v, {}, {}, Shard.whole(q.shape, k.shape))


@functools.cache
def forward(N: int, d: int, M: int) -> Forward:
    return algorithm_1(plain(N, d), paper_blocks(M, d))


@functools.cache
def backward(N: int, d: int, M: int) -> Backward:
    return algorithm_4(forward(N, d, M), torch.randn(1, 1, N, d), None, paper_blocks(M, d))


# N, d and M with d ≤ M ≤ Nd, as the theorems ask, and blocks that divide N.
GRID = tuple((N, d, 4 * d * Bc) for N in (32, 64) for d in (4, 8) for Bc in (4, 8, 16) if 4 * Bc <= N)
ODD = ((7, 13, 3, 5, 2, 1), (33, 20, 6, 4, 4, 2), (1, 9, 4, 4, 1, 1))  # Nq, Nk, d, dv, heads, kv_heads


def fitted(terms: Sequence[Sequence[float]], counts: Sequence[int]) -> tuple[np.ndarray, float]:
    """Constants of the terms by least squares of the relative error, and the largest relative error."""
    measured = np.array(counts, dtype=float)
    matrix = np.array(terms, dtype=float) / measured[:, None]
    constants, *_ = np.linalg.lstsq(matrix, np.ones(len(counts)), rcond=None)
    return constants, float(np.abs(matrix @ constants - 1).max())


def test_theorem_1_linear_extra_memory() -> None:
    for N, d, M in ((32, 4, 64), (64, 4, 64), (64, 8, 128)):
        assert forward(N, d, M).hbm.extra == 2 * N  # ℓ and m
        assert backward(N, d, M).hbm.extra == 0
        assert flash2_forward(plain(N, d), paper_blocks(M, d)).hbm.extra == N  # L
        standard = algorithm_0(plain(N, d))
        assert standard.hbm.extra == 2 * N * N  # S and P


def test_theorem_2_flash_attention_moves_n2_d2_over_m() -> None:
    """Counted: 12 N²d²/M from Q and twice O, less than Theorem 2's Nd beside; ℓ and m give 16 N²d/M."""
    counts = [forward(N, d, M).hbm.accesses for N, d, M in GRID]
    terms = [(N * N * d * d / M, N * N * d / M, N * d, N) for N, d, M in GRID]
    constants, error = fitted(terms, counts)
    assert error < 1e-9
    assert constants == pytest.approx((12, 16, 3, 2), abs=1e-6)


@pytest.mark.parametrize(("factors", "expected"), [((2, 1, 1), 4), ((1, 2, 1), 4), ((1, 1, 2), 1 / 2)], ids=str)
def test_theorem_2_and_5_in_each_variable(factors: tuple[int, int, int], expected: float) -> None:
    """Twice N or twice d: four times the accesses. Twice M: half of them. Up to the terms of lower order."""
    N, d, M = 64, 8, 256
    scaled = tuple(size * factor for size, factor in zip((N, d, M), factors, strict=True))
    assert forward(*scaled).hbm.accesses / forward(N, d, M).hbm.accesses == pytest.approx(expected, rel=0.15)
    assert backward(*scaled).hbm.accesses / backward(N, d, M).hbm.accesses == pytest.approx(expected, rel=0.15)


def test_theorem_2_standard_attention_moves_nd_plus_n2() -> None:
    sizes = [(N, d) for N in (16, 32, 64) for d in (4, 8, 16)]
    forwards = [algorithm_0(plain(N, d)) for N, d in sizes]
    terms = [(N * N, N * d, N) for N, d in sizes]
    constants, error = fitted(terms, [each.hbm.accesses for each in forwards])
    assert error < 1e-9
    assert constants == pytest.approx((4, 4, 1), abs=1e-6)
    backwards = [algorithm_3(each, torch.randn(1, 1, N, d)) for each, (N, d) in zip(forwards, sizes, strict=True)]
    constants, error = fitted(terms, [each.hbm.accesses for each in backwards])
    assert error < 1e-9
    assert constants == pytest.approx((7, 8, 0), abs=1e-6)


def test_products_by_blocks_move_no_less() -> None:
    problem = plain(24, 4)
    assert algorithm_0(problem, BlockSizes(8, 6)).hbm.accesses > algorithm_0(problem).hbm.accesses


def test_theorem_5_backward() -> None:
    counts = [backward(N, d, M).hbm.accesses for N, d, M in GRID]
    terms = [(N * N * d * d / M, N * N * d / M, N * d) for N, d, M in GRID]
    constants, error = fitted(terms, counts)
    assert error < 1e-9
    assert constants == pytest.approx((20, 8, 7), abs=1e-6)


def test_flash_moves_less_where_d2_is_less_than_m() -> None:
    N, d, M = 256, 4, 512
    blocks = paper_blocks(M, d)
    assert 5 * algorithm_1(plain(N, d), blocks).hbm.accesses < 2 * algorithm_0(plain(N, d)).hbm.accesses


def test_theorem_4_block_sparse() -> None:
    """A fraction s of the blocks: Nd is moved whatever the mask, 12 s N²d²/M for the blocks that are left."""
    generator = torch.Generator().manual_seed(1)
    terms, counts = [], []
    for N, d, M in ((32, 8, 128), (64, 8, 256), (64, 4, 64), (64, 16, 1024)):
        blocks = paper_blocks(M, d)
        rows, columns = -(-N // blocks.Br), -(-N // blocks.Bc)
        for share in (0.25, 0.5, 0.75, 1.0):
            kept = torch.rand(1, 1, rows, columns, generator=generator) < share
            kept[..., 0, :] = True  # every block of keys is needed by some row
            s = float(kept.double().mean())
            found = algorithm_5(plain(N, d), blocks, kept)
            terms.append((s * N * N * d * d / M, s * N * N * d / M, N * d, N, rows * columns))
            counts.append(found.hbm.accesses)
    constants, error = fitted(terms, counts)
    assert error < 1e-9
    assert constants == pytest.approx((12, 16, 3, 2, 1), abs=1e-5)


def test_sparse_attention_moves_in_proportion_to_what_is_kept() -> None:
    """A causal mask at blocks of 4: (T + 1) / 2T of the blocks."""
    problem = plain(64, 8)
    causal = Problem(
        parse_text("attention c { head_dim 8 mask causal }").specs[0], *_qkv(problem), {}, {}, problem.shard
    )
    blocks = BlockSizes(4, 4)
    visited = int(kept_blocks(causal, blocks).sum())
    assert visited == 16 * 17 // 2
    assert algorithm_5(causal, blocks).hbm.loads["Q"] == 4 * 8 * visited


@pytest.mark.parametrize(("Nq", "Nk", "d", "dv", "heads", "kv_heads"), ODD)
def test_closed_forms_of_odd_sizes(Nq: int, Nk: int, d: int, dv: int, heads: int, kv_heads: int) -> None:
    problem = plain(Nq, d, heads=heads, kv_heads=kv_heads, Nk=Nk, dv=dv)
    lengths = Lengths(heads, kv_heads, Nq, Nk, d, dv)
    d_o = torch.randn(1, heads, Nq, dv)
    standard = algorithm_0(problem)
    assert standard.hbm.accesses == paper.standard_forward(lengths)
    assert algorithm_3(standard, d_o).hbm.accesses == paper.standard_backward(lengths)
    for blocks in (BlockSizes(4, 5), BlockSizes(3, 2)):
        flash = algorithm_1(problem, blocks)
        assert flash.hbm.accesses == paper.flash_forward(lengths, blocks)
        assert algorithm_4(flash, d_o, None, blocks).hbm.accesses == paper.flash_backward(lengths, blocks)
        assert flash.hbm.accesses >= paper.lower_bound(lengths)
        assert flash.hbm.extra == forms.flash_memory(lengths)
        chunks = rabe_staats_forward(problem, blocks)
        assert chunks.hbm.accesses == paper.rabe_staats_forward(lengths, blocks)
        assert chunks.hbm.extra == forms.rabe_staats_memory(lengths, blocks)
        back = rabe_staats_backward(chunks, d_o, None, blocks)
        assert back.hbm.accesses == paper.rabe_staats_backward(lengths, blocks)
        assert back.hbm.extra == forms.rabe_staats_memory(lengths, blocks, backward=True)
    assert standard.hbm.extra == forms.standard_memory(lengths)


@pytest.mark.parametrize(("Nq", "Nk", "d", "dv", "heads", "kv_heads"), ODD)
def test_flops_are_those_that_pytorch_counts(Nq: int, Nk: int, d: int, dv: int, heads: int, kv_heads: int) -> None:
    """Of the matrix products, against PyTorch's own counter and the closed forms."""
    problem = plain(Nq, d, heads=heads, kv_heads=kv_heads, Nk=Nk, dv=dv)
    lengths, blocks = Lengths(heads, kv_heads, Nq, Nk, d, dv), BlockSizes(17, 11)
    d_o = torch.randn(1, heads, Nq, dv)
    passes: dict[str, tuple[Callable[[], Forward | Standard], Callable[[Any], Backward], int]] = {
        "standard": (
            lambda: algorithm_0(problem),
            lambda forward: algorithm_3(forward, d_o),
            paper.standard_backward_flops(lengths),
        ),
        "flash": (
            lambda: algorithm_1(problem, blocks),
            lambda forward: algorithm_4(forward, d_o, None, blocks),
            paper.flash_backward_flops(lengths),
        ),
        "flash 2": (
            lambda: flash2_forward(problem, blocks),
            lambda forward: flash2_backward(forward, d_o, None, blocks),
            paper.flash_backward_flops(lengths),
        ),
        "rabe_staats": (
            lambda: rabe_staats_forward(problem, blocks),
            lambda forward: rabe_staats_backward(forward, d_o, None, blocks),
            forms.rabe_staats_backward_flops(lengths),
        ),
    }
    for name, (ahead, back, backward_flops) in passes.items():
        with FlopCounterMode(display=False) as counter:
            forward = ahead()
        assert forward.hbm.flops == counter.get_total_flops() == paper.forward_flops(lengths), name
        with FlopCounterMode(display=False) as counter:
            found = back(forward)
        assert found.hbm.flops == counter.get_total_flops() == backward_flops, name


def test_rabe_and_staats_save_memory_and_no_accesses() -> None:
    """B.5: memory grows with √N a query, and not with N; accesses stay those of standard attention, and some more."""
    N, d = 256, 8
    problem, lengths = plain(N, d), Lengths(1, 1, N, N, d, d)
    blocks = rabe_staats_blocks(N, N)
    assert blocks == BlockSizes(256, 16)
    assert rabe_staats_blocks(4096, 5000) == BlockSizes(1024, 71)
    chunks, standard = rabe_staats_forward(problem, blocks).hbm, algorithm_0(problem).hbm
    flash = algorithm_1(problem, paper_blocks(512, d)).hbm
    assert flash.extra < chunks.extra < standard.extra / 2
    assert flash.accesses < standard.accesses < chunks.accesses
    assert forms.rabe_staats_backward_flops(lengths) > paper.flash_backward_flops(lengths)
    # 16 times the length: 4 times the keys of a chunk, and 4 times the chunks.
    long = Lengths(1, 1, 16 * N, 16 * N, d, d)
    wide = BlockSizes(256, 64)
    growth = (forms.rabe_staats_memory(long, wide) - forms.flash_memory(long)) / (chunks.extra - 2 * N)
    assert growth == pytest.approx(4)


def test_flash_attention_2_keeps_its_outputs_on_the_chip() -> None:
    """K and V for every block of rows instead of O and the statistics for every block of keys."""
    N, d, blocks = 64, 8, BlockSizes(8, 16)
    one, two = algorithm_1(plain(N, d), blocks).hbm, flash2_forward(plain(N, d), blocks).hbm
    assert two.by_name == {"Q": N * d, "K": 8 * N * d, "V": 8 * N * d, "O": N * d, "L": N}
    assert two.stores["O"] < one.stores["O"]
    second = flash2_backward(flash2_forward(plain(N, d), blocks), torch.randn(1, 1, N, d), None, blocks).hbm
    first = algorithm_4(algorithm_1(plain(N, d), blocks), torch.randn(1, 1, N, d), None, blocks).hbm
    assert second.accesses < first.accesses
    assert second.loads["O"] == N * d  # for D, once


def test_the_kernels_move_what_flash_attention_2_moves() -> None:
    """The generated forward pass at its own tiles: the same elements of q, k, v, o and lse, two or four bytes each."""
    text = "attention c { head_dim 16 dtype f16 mask causal schedule { Br = 32 Bc = 16 } }"
    variant, plan = planned(text)
    problem = plain(100, 16, heads=4, kv_heads=2, Nk=90)
    problem = Problem(variant.spec, *_qkv(problem), {}, {}, problem.shard)
    tiles = plan.elements[0]
    blocks = BlockSizes(tiles.forward.Br, tiles.forward.Bc)
    counted = flash2_forward(problem, blocks, kept_blocks(problem, blocks)).hbm.by_name
    launches = forward_launches(plan, dropped=False)
    values = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 100, "kv_len": 90}
    values |= {f"{name}_start": 0 for name in "bhq"} | {"kv_start": 0}
    values |= {"lse_parts": 0, "b_total": 1, "h_total": 4, "q_total": 100, "kv_total": 90}
    predicted = bytes_of_call(plan.recipe, tiles, plan.symbol, launches, values, {})
    assert GPUS["sm_80"].block_bytes >= tiles.forward.sram_bytes
    assert predicted == {
        "q": 2 * counted["Q"],
        "k": 2 * counted["K"],
        "v": 2 * counted["V"],
        "o": 2 * counted["O"],
        "lse": 4 * counted["L"],
    }


def _qkv(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return problem.q, problem.k, problem.v
