"""The plan for GPUs: what fits, what is refused, and that the reasons say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.diagnostics import SpecError
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Spill
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.recipes import candidates
from flashgen.targets.gpu.schedules import KeyWarps, Warps
from flashgen.targets.gpu.tiles import still_spilled
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import ELEMENTS, planned, variant_of

HEAD_DIMS = (1, 16, 17, 32, 40, 64, 80, 96, 112, 128, 129, 160, 192, 200, 224, 255, 256)
EVERY_SM_80 = tuple(name for name, target in GPUS.items() if target.capability >= 80)
RICH = """
attention rich {{
    head_dim {head_dim}
    dropout  0.1
    tensor   table: f32[33, H] grad
    tensor   rows: f32[H, Nq] grad
    score    s - 0.01 * sqdist + table[clamp(i - j, 0, 32), h] + rows[h, i]
    mask     causal
}}
"""


@pytest.mark.parametrize("target", EVERY_SM_80)
def test_no_head_dimension_is_out_of_resources(target: str) -> None:
    for head_dim in HEAD_DIMS:
        for text in (f"attention t {{ head_dim {head_dim} }}", RICH.format(head_dim=head_dim)):
            _, plan = planned(text, target)
            assert tuple(plan.by_element) == ELEMENTS
            for each in plan.elements:
                for tiles in (each.forward, each.backward, each.queries):
                    assert 0 < tiles.sram_bytes <= GPUS[target].block_bytes
                assert each.backward.keys_sram_bytes <= each.backward.sram_bytes


def test_values_may_be_narrower_than_keys() -> None:
    _, plan = planned("attention mla { head_dim 192/128 }", "sm_86")
    assert all(each.forward.sram_bytes <= GPUS["sm_86"].block_bytes for each in plan.elements)


def test_64_kib_hold_every_head_dimension_in_16_bits() -> None:
    for head_dim in HEAD_DIMS:
        _, plan = planned(f"attention t {{ head_dim {head_dim} }}", "sm_75")
        assert {ElementType.F16, ElementType.BF16} <= set(plan.by_element)


def test_a_type_that_does_not_fit_is_left_out_unless_asked_for() -> None:
    _, plan = planned("attention t { head_dim 256 }", "sm_75")
    assert ElementType.F32 not in plan.by_element
    assert any("f32: left out" in reason for reason in plan.reasons)
    with pytest.raises(SpecError) as refused:
        planned("attention t { head_dim 256 dtype f32 }", "sm_75")
    assert [each.code for each in refused.value.diagnostics] == ["E406"]


def test_larger_memory_takes_larger_tiles() -> None:
    small, large = (planned("attention t { head_dim 256 }", target)[1] for target in ("sm_86", "sm_90a"))
    assert small.forward.Br * small.forward.Bc < large.forward.Br * large.forward.Bc
    assert any("needs 130" in each.reason for each in small.rejected)


def test_what_spilled_is_passed_over() -> None:
    variant, plan = planned("attention t { head_dim 64 dtype f16 }")
    first = plan.elements[0].forward
    assert isinstance(first, Warps)
    tile = Warps(first.Br, first.Bc, first.warps, first.stages, first.q_in_registers)
    again = GPUS["sm_80"].plan(variant, spills=[Spill(ElementType.F16, "forward", tile, 512)])
    assert again.elements[0].forward != first
    assert any("spills 512 bytes" in each.reason for each in again.rejected)


def test_what_will_spill_as_well_is_passed_over_without_a_compilation() -> None:
    """64 × 128 keeps 64 numbers a thread less than 128 × 128; tiles without warpgroups may have other registers."""
    variant = variant_of("attention t { head_dim 64 dtype bf16 }")
    target = GPUS["sm_90a"]
    rows = [each.row for each in candidates("backward", decide(variant), ElementType.BF16, target, target.recipes)]
    whole, larger, smaller = rows[:3]
    assert (larger.Br, smaller) == (128, replace(larger, Br=64))
    assert whole == replace(larger, s_columns=128)
    assert larger.accumulators(variant, ElementType.BF16) == 192
    assert smaller.accumulators(variant, ElementType.BF16) == 128
    spill = Spill(ElementType.BF16, "backward", larger, 1276)
    assert still_spilled(variant, spill, larger) == 1276
    assert still_spilled(variant, spill, smaller) == 1276 - 8 * 64
    assert still_spilled(variant, spill, KeyWarps(64, 128, 8, 2, s_columns=64)) == 0
    assert still_spilled(variant, replace(spill, bytes=400), smaller) == 0
    plan = target.plan(variant, spills=[replace(spill, tile=whole), spill])
    (would,) = (each.reason for each in plan.rejected if "would spill about 764 bytes" in each.reason)
    assert "64 × 128" in would
    assert not plan.by_element[ElementType.BF16].backward.warpgroups


def test_hooks_leave_no_registers_for_wide_tiles() -> None:
    _, plain = planned("attention t { head_dim 64 dtype f16 }")
    _, capped = planned("attention t { head_dim 64 dtype f16 score 30 * tanh(s / 30) }")
    assert plain.forward.Bc == 128
    assert capped.forward.Bc == 64


def test_the_schedule_pins_tiles() -> None:
    text = "attention t { head_dim 64 dtype f16 schedule { Br = 32 Bc = 48 backward_Br = 16 backward_Bc = 32 } }"
    _, plan = planned(text)
    assert (plan.forward.Br, plan.forward.Bc) == (32, 48)
    assert (plan.backward.Br, plan.backward.Bc) == (16, 32)
    assert plan.elements[0].forward.warps in (1, 2)


def test_one_warpgroup_copies_for_itself() -> None:
    """Warps that copied for it would be left more registers than a thread may have."""
    pins = "Br = 64 Bc = 64 warps = 4 backward_Br = 64 backward_Bc = 64 backward_warps = 4"
    text = f"attention t {{ head_dim 128 dtype bf16 mask causal schedule {{ {pins} }} }}"
    tiles = GPUS["sm_90a"].plan(variant_of(text)).by_element[ElementType.BF16]
    for each in (tiles.forward, tiles.backward):
        assert (each.Br, each.Bc, each.warps) == (64, 64, 4)
        assert each.warpgroups
        assert (each.producers, each.blocks) == (0, 2)


@pytest.mark.parametrize("pins", ["Br = 40", "Br = 64 warps = 3", "backward_Bc = 24", "backward_warps = 5"])
def test_pins_that_cannot_work_are_refused(pins: str) -> None:
    variant = variant_of(f"attention t {{ head_dim 64 dtype f16 schedule {{ {pins} }} }}")
    with pytest.raises(SpecError) as refused:
        GPUS["sm_80"].plan(variant)
    assert {each.code for each in refused.value.diagnostics} == {"E403"}


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
def test_warps_that_share_keys_have_parts_of_one_length(target: str) -> None:
    for head_dim in range(8, 264, 8):
        _, plan = planned(f"attention any {{ head_dim {head_dim}  mask (i * j + i) % 7 < 3 and causal }}", target)
        for each in plan.elements:
            assert padded(head_dim) % (16 * each.backward.split) == 0


@pytest.mark.parametrize("head_dim", ["16/256", "192/80", "144/8"])
def test_a_large_head_dimension_beside_one_that_cannot_be_divided(head_dim: str) -> None:
    with pytest.raises(SpecError) as refused:
        GPUS["sm_80"].plan(variant_of(f"attention uneven {{ head_dim {head_dim} }}"))
    (said,) = refused.value.diagnostics
    assert said.code == "E406"
    assert head_dim in said.message
    assert "multiples of 32" in said.notes[0]
