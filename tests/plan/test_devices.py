"""The table of devices: figures that agree with one another, sources for all of them, and files that users write."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.device_table import DeviceFileError, board_of, known_devices, product_of, read_devices, user_file
from flashgen.targets.gpu.architecture import multiprocessor_of
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.registry import ARCHITECTURES, GPUS
from tests.plan.test_planner import variant

SHIPPED = known_devices(Path("/nowhere/devices.toml"))
# Dense flops a clock of a multiprocessor's tensor cores with float32 sums; GeForce parts have half of their chip's.
TENSOR_RATES = {70: 1024, 75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
GEFORCE_RATE = 512

OWN = """
[gpu.mine]
name = "A card of my own"
target = "sm_89"
source = "measured"
multiprocessors = 10
clock_mhz = 1000
l2_mib = 8
memory_gb_per_s = 100.5
tensor_16_tflops = 10
fma_f32_tflops = 2.6
shared_kib_per_block = 64

[[cpu.laptop.figures]]
source = "its box"
cores = 4
lanes = 8
l1_kib = 32
l2_kib = 1280
[[cpu.laptop.figures]]
source = "guessed"
clock_mhz = 3000
memory_gb_per_s = 50
"""


@pytest.mark.parametrize("gpu", SHIPPED.gpus.values(), ids=lambda gpu: gpu.name)
def test_peaks_follow_from_multiprocessors_and_clock(gpu: Gpu) -> None:
    """Two figures from different pages that contradict each other would show here."""
    per_clock = gpu.sms * gpu.clock_hz
    expected = GEFORCE_RATE if gpu.name.startswith("rtx") else TENSOR_RATES[gpu.target.capability]
    assert gpu.tensor_16 / per_clock == pytest.approx(expected, rel=0.06)
    lanes = multiprocessor_of(gpu.target).float_lanes
    assert gpu.fma / 2 / per_clock == pytest.approx(lanes, rel=0.1)
    if gpu.tensor_tf32 is not None:
        assert gpu.tensor_16 / gpu.tensor_tf32 == pytest.approx(2, rel=0.02)


def test_every_figure_has_a_source() -> None:
    for gpu in SHIPPED.gpus.values():
        assert {"multiprocessors", "clock_mhz", "l2_mib", "memory_gb_per_s", "tensor_16_tflops"} <= set(gpu.sources)
        assert all(len(source) > 10 for source in gpu.sources.values())
    assert all(len(cpu.source) > 10 for cpu in SHIPPED.cpus.values())


def test_the_table_holds_what_people_have() -> None:
    wanted = "v100 t4 a100 h100 h200 b200 l4 l40s rtx3090 rtx4090 rtx5090"
    assert set(wanted.split()) <= set(SHIPPED.gpus)
    for name in ("rtx3090", "rtx4090", "rtx5090", "l4"):
        assert SHIPPED.gpus[name].target.block_bytes == 99 * 1024
    assert {gpu.target.name for gpu in SHIPPED.gpus.values()} <= set(ARCHITECTURES)
    assert not SHIPPED.gpus["v100"].is_generated_for


def test_every_architecture_is_timed_on_a_product() -> None:
    for target in GPUS.values():
        found = product_of(target)
        assert (found.name, found.target) == (target.name, target)
    assert product_of(GPUS["sm_80"]).product == SHIPPED.gpus["a100"].product


def test_a_board_has_the_figures_of_its_product() -> None:
    """Of one that the table does not have, those of its architecture."""
    target = GPUS["sm_90a"].with_sram(100 * 1024)
    h200 = board_of(target, "NVIDIA H200")
    assert (h200.name, h200.target, h200.bandwidth) == ("sm_90a", target, SHIPPED.gpus["h200"].bandwidth)
    assert board_of(target, "NVIDIA H100 80GB HBM3").bandwidth == SHIPPED.gpus["h100"].bandwidth
    assert board_of(target, "NVIDIA GH200 480GB") == product_of(target)
    assert len({gpu.reported for gpu in SHIPPED.gpus.values()}) == len(SHIPPED.gpus)


def test_users_add_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(tmp_path))
    assert user_file() == tmp_path / "devices.toml"
    assert "mine" not in known_devices().gpus
    user_file().write_text(OWN)
    known = known_devices()
    mine = known.gpus["mine"]
    assert (mine.sms, mine.clock_hz, mine.bandwidth) == (10, 1e9, 100.5e9)
    assert (mine.target.name, mine.target.block_bytes) == ("sm_89", 64 * 1024)
    assert mine.is_own
    assert mine.sources["clock_mhz"] == "measured"
    assert known.cpus["laptop"].sram_bytes == 1280 * 1024
    assert set(SHIPPED.gpus) <= set(known.gpus)
    assert plan_cpu(variant("head_dim 64"), known.cpus["laptop"]).device == "laptop"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[gpu.mine]", "[gpu.mine"), "not TOML"),
        (("[gpu.mine]", "[tpu.mine]"), "'tpu' is unknown"),
        (('target = "sm_89"', 'target = "sm_999"'), "'sm_999' is not an architecture"),
        (('target = "sm_89"\n', ""), "'target' is missing"),
        (('source = "measured"\n', ""), "without a 'source'"),
        (("multiprocessors", "multiprocesors"), "did you mean 'multiprocessors'"),
        (("multiprocessors = 10\n", ""), "'multiprocessors' missing"),
        (("clock_mhz = 1000", "clock_mhz = -1"), "'clock_mhz' is -1"),
        (("clock_mhz = 1000", 'clock_mhz = "fast"'), "'clock_mhz' is 'fast'"),
        (("clock_mhz = 1000", "clock_mhz = nan"), "'clock_mhz' is nan"),
        (("multiprocessors = 10", "multiprocessors = 10.5"), "a whole number"),
        (("multiprocessors = 10", "multiprocessors = true"), "'multiprocessors' is True"),
        (("clock_mhz = 3000", "clock_mhz = 3000\ncores = 5"), "'cores' is given twice"),
        (("[gpu.mine]", "[gpu.local]"), "choose another name"),
        (("[gpu.mine]", "[gpu.sm_90]"), "choose another name"),
        (("[gpu.mine]", "[gpu.Mine]"), "choose another name"),
        (("[[cpu.laptop.figures]]", "[[cpu]]"), "[cpu.NAME]"),
        (('name = "A card of my own"', "name = 3"), "are texts"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "devices.toml"
    text = OWN.replace(*change, 1)
    assert text != OWN
    path.write_text(text)
    with pytest.raises(DeviceFileError) as refused:
        read_devices(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceFileError, match="not TOML"):
        read_devices(path)
