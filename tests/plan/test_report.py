"""The report of a plan: buffers that add up, bytes beside standard attention's, the paper's tile, runners-up."""

from __future__ import annotations

import json

import pytest

from flashgen.diagnostics import SpecError
from flashgen.ir.shape import Shape
from flashgen.plan import paper
from flashgen.plan.paper import BlockSizes, Lengths
from flashgen.plan.report import PassReport
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.device_table import known_devices
from flashgen.targets.families import report
from flashgen.targets.protocol import Device
from tests.plan.test_planner import variant

KNOWN = known_devices()
SHAPE = Shape(2, 8, 2, 1000, 1500)


def passes(body: str, device: str = "a100", shape: Shape = SHAPE) -> dict[str, PassReport]:
    found: Device = KNOWN.gpus[device] if device in KNOWN.gpus else KNOWN.cpus[device]
    return {f"{each.name} {each.element}": each for each in report(variant(body), found, shape).passes}


@pytest.mark.parametrize("device", ["a100", "h100", "rtx4090", "t4", "v100", "zen3"])
@pytest.mark.parametrize(
    "body",
    [
        "head_dim 64 mask causal",
        "head_dim 192/128 dtype f16",
        "head_dim 96 param w: f32 grad score -sqdist * w",
        "head_dim 128 dtype bf16 tensor t: f32[33, H] grad score s + t[clamp(i - j, 0, 32), h]",
    ],
)
def test_buffers_add_up_to_what_is_kept(body: str, device: str) -> None:
    for each in passes(body, device).values():
        for sizes, tiles in zip(each.buffers.values(), each.tiles, strict=True):
            counted = getattr(tiles, "keys_sram_bytes", tiles.sram_bytes)
            assert sum(sizes.values()) in (tiles.sram_bytes, counted)
            assert min(sizes.values()) > 0


def test_bytes_beside_standard_attention_and_the_least() -> None:
    each = variant("head_dim 64 dtype f16 mask causal")
    for name, found in passes("head_dim 64 dtype f16 mask causal").items():
        moved, lengths = found.moved, Lengths.of(SHAPE, each.head_dim)
        forward = name.startswith("forward")
        assert moved.kernels == found.time.hbm_bytes
        assert moved.standard == 2 * (paper.standard_forward if forward else paper.standard_backward)(lengths)
        assert moved.standard > moved.kernels > moved.least
        chunks = paper.rabe_staats_blocks(1000, 1500)
        closed_form = paper.rabe_staats_forward if forward else paper.rabe_staats_backward
        assert moved.rabe_staats == 2 * closed_form(lengths, chunks) > moved.standard  # it saves memory alone


def test_the_papers_tile() -> None:
    """163 KiB of float16 at d = 64: M = 83456 numbers, B_c = 326, B_r = 64. Backward's buffers do not fit."""
    found = passes("head_dim 64 dtype f16")
    forward, backward = found["forward f16"].paper, found["backward f16"].paper
    assert forward.elements == 163 * 1024 // 2
    assert forward.blocks == backward.blocks == BlockSizes(64, 326)
    assert forward.needed == 2 * sum((64 * 64, 326 * 64, 326 * 64, 64 * 64, 64 * 326, 4 * 64))
    assert forward.fits
    assert not backward.fits
    assert backward.needed > 1.5 * 163 * 1024
    assert backward.kernel_blocks == BlockSizes(64, 336)


def test_runners_up_say_why_they_lost() -> None:
    for each in passes("head_dim 64 dtype f16 mask causal").values():
        assert 1 <= len(each.runners_up) <= 4
        chosen = each.tiles[0]
        for other in each.runners_up:
            assert other.why
            assert other.seconds == pytest.approx((1 + other.slower) * each.time.seconds)
        assert [other.seconds for other in each.runners_up] == sorted(other.seconds for other in each.runners_up)
        assert chosen.Br


def test_a_cpu_with_matrix_registers_is_reported_by_what_calls_take() -> None:
    """bfloat16 always, float32 where rows repay its parts: neither short calls do nor the low tiles of small blocks."""
    xeon = KNOWN.cpus["sapphire-rapids"]
    assert list(passes("head_dim 64", "zen3")) == ["forward f32", "backward f32"]
    for body, shape, split in (
        ("head_dim 64", SHAPE, True),
        ("head_dim 64", Shape(2, 8, 2, 100, 1500), False),
        ("head_dim 64 layout block 64: I >= J", SHAPE, False),
    ):
        chosen = plan_cpu(variant(body), xeon)
        found = passes(body, "sapphire-rapids", shape)
        assert list(found) == ["forward f32", "backward f32", "forward bf16", "backward bf16"]
        for name, products in (("f32", Products.SPLIT if split else Products.VECTORS), ("bf16", Products.BFLOAT16)):
            for pass_name, tile in chosen.tiles[products].items():
                each = found[f"{pass_name} {name}"]
                assert each.tiles == (tile,)
                assert sum(each.buffers[pass_name].values()) == tile.sram_bytes
                assert all((other.Br, other.Bc) != (tile.Br, tile.Bc) for other in each.runners_up)
        assert found["forward bf16"].moved.standard * 2 == found["forward f32"].moved.standard
        assert found["forward bf16"].time.seconds < found["forward f32"].time.seconds


def test_a_cpu_that_multiplies_pairs_is_reported_by_what_calls_take() -> None:
    zen4 = KNOWN.cpus["zen4"]
    chosen, found = plan_cpu(variant("head_dim 64"), zen4), passes("head_dim 64", "zen4")
    assert list(found) == ["forward f32", "backward f32", "forward bf16", "backward bf16"]
    for name, products in (("f32", Products.VECTORS), ("bf16", Products.PAIRS)):
        for pass_name, tile in chosen.tiles[products].items():
            each = found[f"{pass_name} {name}"]
            assert each.tiles == (tile,)
            assert sum(each.buffers[pass_name].values()) == tile.sram_bytes
    assert found["forward bf16"].time.seconds < found["forward f32"].time.seconds


def test_pins_hold_for_runners_up() -> None:
    found = passes("head_dim 64 dtype f16 schedule { Br = 64 Bc = 32 }")["forward f16"]
    assert {(other.Br, other.Bc) for other in found.runners_up} <= {(64, 32)}


def test_a_gpu_without_kernels_is_planned_for() -> None:
    found = report(variant("head_dim 64 dtype f16"), KNOWN.gpus["v100"], SHAPE)
    assert any("not generated for sm_70" in remark for remark in found.remarks)
    assert not report(variant("head_dim 64 dtype f16"), KNOWN.gpus["t4"], SHAPE).remarks


def test_what_is_unknown_is_said() -> None:
    found = report(
        variant("head_dim 64 dtype f16 tensor doc: i32[B, Nk] mask doc[b, i] == doc[b, j]"), KNOWN.gpus["a100"], SHAPE
    )
    assert any("'doc'" in remark for remark in found.remarks)


def test_memory_that_fits_nothing_says_how_much_is_needed() -> None:
    gpu = KNOWN.gpus["a100"].with_sram(6000)
    with pytest.raises(SpecError) as refused:
        report(variant("head_dim 64 dtype f16"), gpu, SHAPE)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E406"
    notes = "\n".join(diagnostic.notes)
    assert "forward, f16: even a tile of 16 × 16 needs 8492 bytes (Q 2048; K 2048; V 2048" in notes
    assert "6000 are there" in notes
    spilt = report(variant("head_dim 64"), KNOWN.cpus["zen3"].with_sram(6000), SHAPE)
    assert any("no tile fits" in reason and "row state" in reason for reason in spilt.plan.reasons)


def test_everything_is_plain_data() -> None:
    found = report(variant("head_dim 64 mask causal"), KNOWN.gpus["h200"], SHAPE).to_json()
    text = json.loads(json.dumps(found, default=str))
    assert text["passes"][0]["hbm_bytes"]["by_buffer"]["q"] == 2 * 2 * 8 * 1000 * 64
    assert KNOWN.gpus["h200"].target.plan(variant("head_dim 64 mask causal")).target == text["target"]
