"""The planner: tiles that fit, reasons that hold, pins that are obeyed or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import SpecError
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.plan import Tiles
from flashgen.targets.cpu import device as devices
from flashgen.targets.cpu.device import GENERIC_CPU, local_cpu
from flashgen.targets.cpu.limits import unused_pins
from flashgen.targets.cpu.plan import CpuPlan, plan_cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.cpu.recipes import USABLE_SRAM
from flashgen.targets.device_table import known_devices
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import read_cpuinfo


def variant(body: str) -> Variant:
    """The only head dimension of a spec."""
    spec = parse_text(f"attention a {{ {body} }}").specs[0]
    return analyse(spec, spec.head_dims[0])


def kinds_of(chosen: CpuPlan) -> list[Mapping[str, Tiles]]:
    """The passes of each kind of products."""
    return [chosen.tiles[products] for products in Products]


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("device", known_devices().cpus.values(), ids=lambda device: device.name)
def test_tiles_fit_wherever_some_tile_does(head_dim: int, device: devices.Cpu) -> None:
    chosen = plan_cpu(variant(f"head_dim {head_dim}"), device)
    for tile in (tile for passes in kinds_of(chosen) for tile in passes.values()):
        spilt = any("spills least" in reason for reason in chosen.reasons)
        assert tile.sram_bytes <= USABLE_SRAM * device.sram_bytes or spilt


def test_more_memory_never_makes_tiles_smaller() -> None:
    a = variant("head_dim 64")
    areas = []
    for kib in (64, 128, 256, 512, 1024, 4096):
        chosen = plan_cpu(a, replace(GENERIC_CPU, sram_bytes=kib * 1024))
        areas.append(chosen.forward.Br * chosen.forward.Bc)
    assert areas == sorted(areas)


@pytest.mark.parametrize("block", [16, 48, 64, 100, 256])
def test_tiles_go_with_the_blocks_of_a_layout(block: int) -> None:
    chosen = plan_cpu(variant(f"head_dim 64 layout block {block}: I == J"), GENERIC_CPU)
    for tile in (tile for passes in kinds_of(chosen) for tile in passes.values()):
        assert block % tile.Bc == 0 or tile.Bc % block == 0
        assert tile.Br % 16 == 0
        if block % 16 == 0:
            assert block % tile.Br == 0 or tile.Br % block == 0


def test_narrow_windows_take_fewer_keys_at_a_time() -> None:
    """But forward in vectors, where rows leave out keys that they do not keep."""
    device = replace(GENERIC_CPU, sram_bytes=2 * 1024 * 1024)
    by_width = [
        plan_cpu(variant(f"head_dim 64 mask causal and window_left({width})"), device) for width in (32, 256, 4096)
    ]
    for products, *of_each in zip(Products, *map(kinds_of, by_width), strict=True):
        for name in ("forward", "backward"):
            columns = [passes[name].Bc for passes in of_each]
            assert columns == sorted(columns)
            is_trimmed = products.in_vectors and name == "forward"
            assert (columns[0] < columns[-1]) is not is_trimmed


def test_pins_are_obeyed() -> None:
    chosen = plan_cpu(
        variant("head_dim 64 schedule { Br = 32 Bc = 48 backward_Br = 16 backward_Bc = 40 }"), GENERIC_CPU
    )
    assert (chosen.forward.Br, chosen.forward.Bc) == (32, 48)
    assert (chosen.backward.Br, chosen.backward.Bc) == (16, 40)
    assert any("B_r pinned by the schedule" in reason for reason in chosen.reasons)


@pytest.mark.parametrize("pin", ["Br = 24", "Br = 2048", "backward_Br = 8", "Bc = 4096"])
def test_pins_that_cannot_work_are_refused(pin: str) -> None:
    with pytest.raises(SpecError) as refused:
        plan_cpu(variant(f"head_dim 64 schedule {{ {pin} }}"), GENERIC_CPU)
    assert [diagnostic.code for diagnostic in refused.value.diagnostics] == ["E403"]
    assert pin in str(refused.value)


def test_pins_without_a_meaning_on_a_cpu_are_named() -> None:
    pinned = variant("head_dim 64 schedule { warps = 4 stages = 2 }")
    assert [pin.split()[0] for pin in unused_pins(pinned)] == ["'warps'", "'stages'"]
    assert [reason for reason in plan_cpu(pinned, GENERIC_CPU).reasons if "'warps' of the schedule" in reason]
    assert unused_pins(variant("head_dim 64 schedule { Br = 64 }")) == ()


def test_a_plan_names_its_runners_up() -> None:
    chosen = plan_cpu(variant("head_dim 64"), GENERIC_CPU)
    assert any("KiB are usable" in each.reason for each in chosen.rejected)
    assert any("of work beside the products" in each.reason for each in chosen.rejected)
    assert {each.pass_name for each in chosen.rejected} >= {"forward", "backward"}


def test_the_machine_at_hand() -> None:
    found = local_cpu()
    assert found.cores >= 1
    assert found.lanes in (4, 8, 16)
    assert found.sram_bytes > found.l1_bytes > 0


def test_matrix_registers_are_read_as_linux_reports_them(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for flags, found in [
        ("avx512f amx_bf16 amx_tile", True),
        ("avx512f amx_tile", False),
        ("amx_bf16 amx_tile", False),
    ]:
        cpuinfo.write_text(f"processor : 0\nflags : fpu {flags} sse\n")
        assert devices._has_amx(read_cpuinfo(cpuinfo)) is found
    assert not devices._has_amx(read_cpuinfo(tmp_path / "none"))


def test_pairs_are_read_as_linux_reports_them() -> None:
    for flags, found in [("avx512f avx512_bf16", True), ("avx512f", False), ("avx512_bf16", False)]:
        assert devices._has_pairs(f"processor : 0\nflags : fpu {flags} sse\n") is found


def test_cache_sizes_are_read_as_linux_reports_them(tmp_path: Path) -> None:
    for number, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, content in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(content + "\n")
    assert devices._cache_bytes(1, tmp_path) == 48 * 1024
    assert devices._cache_bytes(2, tmp_path) == 2 * 1024 * 1024


def planned_for(head_dim: str, target: str) -> GpuPlan:
    (spec,) = parse_text(f"attention big {{ head_dim {head_dim} mask causal }}").specs
    return GPUS[target].plan(analyse(spec, spec.head_dims[0]))


@pytest.mark.parametrize("target", sorted(set(GPUS) - {"sm_70", "sm_75"}))
@pytest.mark.parametrize("head_dim", ["300", "384", "512", "576/512", "512/64", "576"])
def test_large_head_dimensions_have_tiles(head_dim: str, target: str) -> None:
    plan = planned_for(head_dim, target)
    assert {ElementType.F16, ElementType.BF16} <= set(plan.by_element)
    for tiles in plan.passes.values():
        assert tiles.sram_bytes <= GPUS[target].block_bytes


@pytest.mark.parametrize("head_dim", ["300", "384", "448", "512", "576/512"])
def test_two_warpgroups_share_rows_of_a_large_head_dimension(head_dim: str) -> None:
    plan = planned_for(head_dim, "sm_90a")
    for element, each in plan.by_element.items():
        assert each.forward.warpgroups is (element is not ElementType.F32)
        assert each.forward.split > 1
        clusters = element is not ElementType.F32 and head_dim in ("384", "448", "512")
        assert each.backward.warpgroups is clusters
        assert each.backward.cluster == 1 + clusters
    assert "divided among 2 warpgroups" in {each.choice for each in plan.decisions}


def test_registers_hold_whole_rows_up_to_320() -> None:
    tiles = planned_for("320", "sm_90a").by_element[ElementType.BF16].forward
    assert (tiles.warpgroups, tiles.split, tiles.producers) == (True, 1, 4)


def test_a_head_dimension_that_no_tile_has_room_for_is_refused_by_name() -> None:
    assert planned_for("448", "sm_75").by_element
    with pytest.raises(SpecError, match="no tile of 'big' in f16 fits a block's shared memory") as found:
        planned_for("512", "sm_75")
    notes = " ".join(found.value.diagnostics[0].notes)
    assert "64 KiB of shared memory a block on sm_75" in notes
    assert "even a tile of 16 × 16 needs 68560 bytes" in notes
    assert "the CPU's kernels have no such limit" in notes


@pytest.mark.parametrize(("head_dim", "warps"), [("144/100", "two"), ("320/96", "four")])
def test_a_head_dimension_that_warps_cannot_divide_is_refused_by_name(head_dim: str, warps: str) -> None:
    with pytest.raises(SpecError, match=f"cannot divide head dimension {head_dim} among {warps} warps"):
        planned_for(head_dim, "sm_80")
