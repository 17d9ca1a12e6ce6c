"""The model of time: what must hold whatever its constants are, and registers against the compiler's report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import ShapeClass, spearman
from flashgen.plan.plan import Tiles
from flashgen.plan.prediction import PassTime
from flashgen.plan.work import pair_work
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.device_table import known_devices, product_of
from flashgen.targets.gpu import cost as gpu_cost
from flashgen.targets.gpu.family import rivals
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.tiles import MOST_REGISTERS, ElementPlan, registers
from flashgen.targets.registry import GPUS as TARGETS
from tests.cuda.helpers import planned
from tests.cuda.nvrtc import needs_nvrtc
from tests.cuda.test_compile import PLAIN, compiled
from tests.plan.test_planner import variant

GPUS = known_devices().gpus
A100 = GPUS["a100"]
SHAPE = Shape(4, 16, 16, 2048, 2048)


def predicted(body: str, gpu: Gpu = A100, shape: Shape = SHAPE) -> tuple[PassTime, PassTime, ElementPlan]:
    each = variant(f"{body} dtype f16")
    plan = gpu.target.plan(each)
    tiles = plan.elements[0]
    forward, backward = (gpu_cost.pass_time(plan.recipe, tiles, gpu, shape, name) for name in ("forward", "backward"))
    return forward, backward, tiles


@pytest.mark.parametrize("name", GPUS)
def test_no_device_is_faster_than_its_peaks(name: str) -> None:
    gpu = GPUS[name]
    for body in ("head_dim 64", "head_dim 128 mask causal"):
        for found in predicted(body, gpu)[:2]:
            assert 0 < found.flops_per_second < gpu.tensor_16
            assert found.seconds >= max(max(kernel.alone.values()) for kernel in found.kernels)
            assert 0 <= found.main.idle < 1
            assert found.hbm_bytes > 0


@pytest.mark.parametrize("changed", ["sms", "clock_hz", "bandwidth", "tensor_16", "l2_bytes_per_clock"])
def test_a_better_device_is_never_slower(changed: str) -> None:
    """Peaks follow the number of multiprocessors and the clock."""
    larger = {changed: getattr(A100, changed) * 2}
    if changed in ("sms", "clock_hz"):
        larger["tensor_16"] = 2 * A100.tensor_16
    if changed == "sms":
        larger["l2_bytes_per_clock"] = 2 * (A100.l2_bytes_per_clock or 0)
    better = replace(A100, **larger)
    for body in ("head_dim 64 mask causal", "head_dim 128"):
        for one, other in zip(predicted(body)[:2], predicted(body, better)[:2], strict=True):
            assert other.seconds <= one.seconds


def test_half_the_pairs_take_about_half_the_time() -> None:
    for one, other in zip(predicted("head_dim 64")[:2], predicted("head_dim 64 mask causal")[:2], strict=True):
        assert 0.5 < other.seconds / one.seconds < 0.75
        assert other.flops == pytest.approx(one.flops / 2, rel=0.05)


def test_special_functions_cost_time() -> None:
    plain, capped = predicted("head_dim 64")[0], predicted("head_dim 64 score 30 * tanh(s / 30)")[0]
    assert capped.specials == 3 * plain.specials  # tanh takes two
    assert capped.main.alone["special"] > plain.main.alone["special"]


@pytest.mark.parametrize("body", ["head_dim 128", "head_dim 192/128"])
def test_memory_gives_each_operand_once(body: str) -> None:
    """What many short sequences move fits the L2 cache: forward Q, K, V and O, backward a gradient beside each."""
    each = variant(body).head_dim
    for found, times in zip(predicted(body, GPUS["h100"], Shape(32, 16, 16, 512, 512))[:2], (1, 2), strict=True):
        rate = gpu_cost.REACHED_BANDWIDTH * GPUS["h100"].bandwidth
        operands = 2 * 32 * 16 * 512 * 2 * (each.qk + each.v)
        assert found.main.alone["hbm"] * rate == pytest.approx(times * operands)


@pytest.mark.parametrize(
    ("body", "shapes"), [("head_dim 128", 3), ("head_dim 192/128", 3), ("head_dim 128 mask causal", 0)]
)
def test_short_calls_take_the_same_tiles_whatever_the_memory(body: str, shapes: int) -> None:
    """A GPU is known by its architecture, so that an H200 has an H100's memory: products bound both."""
    lengths = (256, 512, 1000, 8192)
    for gpu in (product_of(TARGETS["sm_90a"]), GPUS["h200"]):
        choices = rivals(variant(body), gpu, ElementType.BF16)
        assert choices is not None
        classes = (ShapeClass.of(Shape(16384 // n, 16, 16, n, n), ElementType.BF16) for n in lengths)
        taken = [choices.of_class(of, 1).forward for of in classes]
        assert [tile is not None for tile in taken] == [n < shapes for n in range(len(lengths))]
        assert all((tile.Br, tile.Bc) == (128, 128) for tile in taken if tile is not None)


def test_a_wave_that_is_hardly_filled_costs_a_wave() -> None:
    """One block more than fits takes a second wave, one block on each multiprocessor as long as one alone."""
    one, _, tiles = predicted("head_dim 64", shape=Shape(1, 1, 1, 128, 4096))
    assert one.main.blocks == 1
    full, _, _ = predicted("head_dim 64", shape=Shape(1, A100.sms, A100.sms, tiles.forward.Br, 4096))
    assert full.main.blocks == A100.sms
    assert full.main.idle < 1e-9
    assert full.seconds == pytest.approx(one.seconds, rel=1e-6)
    slots = A100.sms * predicted("head_dim 64")[0].main.resident
    filled = predicted("head_dim 64", shape=Shape(1, slots, slots, tiles.forward.Br, 4096))[0]
    more = predicted("head_dim 64", shape=Shape(1, slots + 1, slots + 1, tiles.forward.Br, 4096))[0]
    assert more.seconds > 1.8 * filled.seconds
    assert more.main.idle > 0.4


def test_work_of_a_pair() -> None:
    """Flops of the products, and what the formula adds to them."""
    forward = pair_work(variant("head_dim 64"), "forward")
    assert forward.flops == 2 * 128
    assert forward.specials == 1
    assert forward.mask == 0
    assert pair_work(variant("head_dim 192/128"), "keys").flops == 2 * (192 + 128 + 128 + 192)
    assert pair_work(variant("head_dim 64 mask causal"), "forward").mask >= 1
    biased = pair_work(variant("head_dim 64 tensor t: f32[Nq, Nk] score s + t[i, j]"), "forward")
    by_row = pair_work(variant("head_dim 64 tensor t: f32[Nq] score s + log(t[i])"), "forward")
    assert biased.others > by_row.others > forward.others
    assert by_row.specials == forward.specials  # once a row
    assert pair_work(variant("head_dim 64 weights sigmoid(s)"), "forward").specials == 2


def test_gradients_of_captured_values_cost_where_they_are_summed() -> None:
    with_table = variant("head_dim 64 tensor t: f32[9, H] grad score s + t[clamp(i - j, 0, 8), h]")
    without = variant("head_dim 64 tensor t: f32[9, H] score s + t[clamp(i - j, 0, 8), h]")
    assert pair_work(with_table, "keys").others > pair_work(without, "keys").others
    assert pair_work(with_table, "queries").others == pair_work(without, "queries").others


def test_a_spill_is_expected_beyond_the_last_register() -> None:
    each = variant("head_dim 256 dtype f16")
    tiles = TARGETS["sm_80"].plan(each).elements[0].forward
    wide = replace(tiles, Br=128, Bc=128, warps=4)
    assert registers(each, ElementType.F16, wide) > MOST_REGISTERS
    assert wide.accumulators(each, ElementType.F16) == 128 * (256 + 128) // 128


@needs_nvrtc
@pytest.mark.parametrize(("head_dim", "element"), [(64, ElementType.BF16), (128, ElementType.F16)])
def test_registers_are_near_the_compilers(head_dim: int, element: ElementType) -> None:
    """Within 40 of what NVRTC reports for each kernel that holds a tile."""
    text = PLAIN.format(head_dim=head_dim, dtype=element)
    each, plan = planned(text, "sm_80")
    tiles = plan.by_element[element]
    estimates = (
        ("forward", registers(each, element, tiles.forward)),
        ("backward", registers(each, element, tiles.backward)),
        ("keys", registers(each, element, tiles.backward)),
        ("queries", registers(each, element, tiles.queries)),
    )
    reported = {kernel.name.split("_")[-2]: kernel.registers for kernel in compiled(text, "sm_80").kernels}
    for name, estimate in estimates:
        assert abs(min(estimate, MOST_REGISTERS) - reported[name]) <= 40, name


def test_a_cpu_with_more_cores_or_a_faster_clock_is_faster() -> None:
    zen3, tile = known_devices().cpus["zen3"], Tiles(64, 64, 0)
    for name in ("forward", "backward"):
        time = partial(cpu_cost.pass_time, variant("head_dim 64"), Products.VECTORS, name)
        base = time(tile, zen3, SHAPE)
        assert time(tile, replace(zen3, cores=128), SHAPE).seconds < base.seconds
        assert time(tile, replace(zen3, clock_hz=5e9), SHAPE).seconds < base.seconds
        peak = zen3.cores * zen3.lanes * 2 * zen3.fma_per_clock * zen3.clock_hz
        assert base.flops_per_second < peak
        spilt = time(Tiles(1024, 1024, 0), zen3, SHAPE)
        assert spilt.main.alone["cache"] > base.main.alone["cache"]


def test_matrix_registers_are_faster_than_vectors_and_slower_than_their_peak() -> None:
    """A window leaves out the strips of rows that keep nothing of a tile: its time follows the pairs, not the tiles."""
    xeon = known_devices().cpus["sapphire-rapids"]
    shape = Shape(8, 8, 8, 4096, 4096)
    for name in ("forward", "backward"):
        times, windows = [], []
        for products in (Products.VECTORS, Products.BFLOAT16, Products.SPLIT):
            found = [variant("head_dim 64"), variant("head_dim 64 mask causal and window_left(256)")]
            tiles = [plan_cpu(each, xeon).tiles[products][name] for each in found]
            whole, window = (
                cpu_cost.pass_time(each, products, name, tile, xeon, shape)
                for each, tile in zip(found, tiles, strict=True)
            )
            times.append(whole.seconds)
            windows.append(window.seconds / whole.seconds)
            if products.parts:
                peak = 2 * xeon.cores * xeon.matrix_per_clock * xeon.clock_hz / products.multiplications
                assert whole.flops_per_second < peak
        assert times[1] < times[2] < times[0]
        assert all(1 / 16 < share < 1 / 6 for share in windows)


def test_pairs_are_faster_than_numbers_and_slower_than_their_peak() -> None:
    zen4, shape = known_devices().cpus["zen4"], Shape(8, 8, 8, 4096, 4096)
    for name in ("forward", "backward"):
        whole = variant("head_dim 64")
        numbers, pairs = (
            cpu_cost.pass_time(whole, products, name, plan_cpu(whole, zen4).tiles[products][name], zen4, shape)
            for products in (Products.VECTORS, Products.PAIRS)
        )
        assert numbers.seconds / 2 < pairs.seconds < numbers.seconds
        assert pairs.flops_per_second < 4 * zen4.cores * zen4.lanes * zen4.pairs_per_clock * zen4.clock_hz


def test_rank_correlation_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(1)
    for size in (2, 3, 8, 50):
        some, others = generator.integers(0, 20, size).tolist(), generator.normal(size=size).tolist()
        some[0], some[1] = -1, 21  # not all alike
        assert spearman(some, others) == pytest.approx(float(stats.spearmanr(some, others).statistic))
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
