"""Kernels of Hopper's own target, whose warpgroups multiply, run by the emulator: numbers, bytes, registers."""

from __future__ import annotations

import pytest

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.loading import load_spec
from flashgen.targets.gpu.model import COPYING_REGISTERS, FINDING_REGISTERS, dq_column_groups, registers
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import emitted, planned
from tests.numeric.helpers import failures

TARGET = GPUS["sm_90a"]

# One warpgroup that copies for itself; two and three with warps that copy; weights before dP and not, with and without
# the score's derivative; grouped heads with empty tiles; parts of dQ; a head dimension of two; gradients of each level;
# weights that are no softmax; more tiles than stages.
SPECS = {
    "causal": ("head_dim 128  mask causal", (1, 2, 1, 200, 300)),
    "documents": ("head_dim 64  tensor doc: i32[B, Nk]  mask causal and same_document(doc)", (1, 4, 2, 300, 500)),
    "wide": ("head_dim 64  mask causal  schedule { Br = 192  Bc = 96  warps = 12 }", (1, 2, 1, 400, 410)),
    "window": ("head_dim 128  mask causal and window_left(60)", (1, 2, 1, 190, 230)),
    "slopes": ("head_dim 96  tensor slope: f32[H] grad  score s - slope[h] * (i - j)", (1, 2, 1, 131, 200)),
    "table": (
        "head_dim 64  tensor table: f32[H, 65] grad  score s + table[h, clamp(i - j, -32, 32) + 32]",
        (1, 2, 2, 100, 150),
    ),
    "softcap": (
        "head_dim 40  score softcap(s, 20)  mask causal and window_left(77)  dropout 0.2",
        (1, 1, 1, 257, 257),
    ),
    "folded": ("head_dim 128  score softcap(s, 20)  mask causal and window_left(77)", (1, 2, 1, 140, 203)),
    "folded, with tops": ("head_dim 64  score softcap(s, 90)  mask causal", (1, 2, 1, 100, 103)),
    "sigmoid": ("head_dim 32  weights sigmoid(s - 2)", (1, 2, 1, 65, 129)),
    "mixed": (
        "head_dim 64  mask causal  schedule { backward_Br = 32  backward_Bc = 32  backward_warps = 2 }",
        (1, 2, 1, 70, 70),
    ),
    "uneven": ("head_dim 192/128  mask causal", (1, 1, 1, 130, 190)),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_emulator_agrees_with_the_reference(name: str) -> None:
    text, shape = SPECS[name]
    spec = flashgen.loads(f"attention hopper {{ dtype bf16  {text} }}", backend="reference").spec
    op = load_spec(spec, "emulator", "sm_90a")
    assert all(each.elements[0].forward.warpgroups for each in op.plan.values())
    case = verify_case(op, spec.head_dims[0], ElementType.BF16, Shape(*shape))
    assert case.ok, failures(case)
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def test_other_targets_have_nothing_of_it() -> None:
    causal = "attention causal { head_dim 128  mask causal }"
    assert "wgmma.mma_async" in emitted(causal, "sm_90a").whole
    for target in ("sm_80", "sm_90", "sm_120"):
        assert "wgmma" not in emitted(causal, target).whole
        assert "Warpgroup" not in emitted(causal, target).whole


@pytest.mark.parametrize("mask", ["causal", "causal and window_left(100)"])
@pytest.mark.parametrize("Br", [64, 128, 256])
def test_every_row_of_a_tile_of_dq_has_a_warpgroup(Br: int, mask: str) -> None:
    _, plan = planned(f"attention a {{ head_dim 16  mask {mask}  schedule {{ backward_Br = {Br} }} }}", "sm_90a")
    tiles = plan.by_element[ElementType.BF16].backward
    assert tiles.Br == Br
    assert tiles.warpgroups == (Br <= 128)
    assert not tiles.warpgroups or 16 * tiles.warps >= Br


def test_what_multiplies_and_what_copies_share_the_registers() -> None:
    """A multiprocessor has 64 Ki registers in four parts; a warp of every warpgroup lies on each."""
    wide = "attention a { head_dim 64  schedule { Br = 192  Bc = 96  warps = 12 } }"
    for text in (wide, "attention a { head_dim 128 }", "attention a { head_dim 256 }"):
        _, plan = planned(text, "sm_90a")
        tiles = plan.by_element[ElementType.BF16].forward
        assert tiles.warpgroups
        assert tiles.producers
        for least in (COPYING_REGISTERS, FINDING_REGISTERS):
            multiplying, others = registers(tiles.warps, tiles.producers, least)
            assert 32 * (multiplying * tiles.warps + others * tiles.producers) <= 64 * 1024
            assert multiplying % 8 == others % 8 == 0
            assert others >= least
            assert 150 <= multiplying <= 240


def test_small_blocks_take_small_tiles_of_dq() -> None:
    """A tile of two blocks visits what either keeps: of random blocks about twice as many."""
    for mask, rows in (("layout block 64: random_blocks(0.1, 1)", 64), ("mask causal", 128)):
        (tiles,) = (
            each.queries for each in planned(f"attention k {{ head_dim 64  dtype bf16  {mask} }}", "sm_90a")[1].elements
        )
        assert tiles.warpgroups
        assert tiles.Br == rows


def test_short_rows_take_small_blocks() -> None:
    """Several blocks a multiprocessor, whose accumulators leave registers for addresses and hooks."""
    short, long = "mask causal and window_left(512)", "mask causal"
    blocks = "layout block 64: popcount(I ^ J) == 1"  # of which a wide tile would hold parts of several
    for head_dim, few_keys in ((64, short), (64, blocks), (128, blocks)):
        plans = [planned(f"attention a {{ head_dim {head_dim}  {mask} }}", "sm_90a")[1] for mask in (few_keys, long)]
        few, many = (plan.by_element[ElementType.BF16].forward for plan in plans)
        assert few.Br * few.Bc < many.Br * many.Bc
        assert (few.warps, few.producers) == (4, 0)
        assert few.blocks * (few.sram_bytes + 1024) <= TARGET.sm_bytes
        assert few.blocks * 128 * (few.Br * (few.Bc + head_dim) // 128 + few.Br * few.Bc // 256 + 24) <= 64 * 1024


@pytest.mark.parametrize(("head_dim", "groups"), [(128, 2), (64, 2), (96, 1), (32, 2), (48, 1)])
def test_a_part_of_dq_does_not_cross_panels(head_dim: int, groups: int) -> None:
    assert dq_column_groups(head_dim, 64, 8, ElementType.BF16) == groups


@pytest.mark.parametrize("body", ["head_dim 17", pytest.param("head_dim 128", marks=pytest.mark.slow)])
def test_short_tiles_of_queries_that_warps_copy(body: str) -> None:
    """Tiles of short calls. Rows of 17 elements come without tensor copies, whose signals may be awaited twice."""
    text = f"attention short {{ {body}  dtype bf16  mask causal  schedule {{ backward_Br = 64  backward_Bc = 128 }} }}"
    op = flashgen.loads(text, backend="emulator", target="sm_90a")
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, Shape(1, 4, 2, 150, 190))
    assert case.ok, failures(case)
