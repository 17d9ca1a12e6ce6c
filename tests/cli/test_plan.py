"""flashgen plan and flashgen devices: tables for people, JSON for machines, messages for mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.helpers import flashgen

SPEC = "attention tiny { head_dim 64 dtype bf16 mask causal }"


@pytest.fixture(autouse=True)
def no_devices_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(tmp_path))
    return tmp_path / "devices.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    return path


def test_ten_lines_say_what_is_read(file: Path) -> None:
    """The recipe; of each pass its tile with the one reason, its recipe, kernels with their times, bytes."""
    done = flashgen("plan", file, "--device", "a100", "--shape", "1,8,8,1024,2048")
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert lines[1].startswith("recipe: tiles to visit: ")
    assert lines[0].startswith("tiny, head_dim 64, on 'a100' (NVIDIA A100 SXM4 80 GB); B,H,Hkv,Nq,Nk = 1,8,8,1024,2048")
    (found,) = json.loads(flashgen("plan", file, "--device", "a100", "--shape", "1,8,8,1024,2048", "--json").stdout)
    for number, each in enumerate(found["passes"]):
        tile, recipe, kernels, moved = lines[2 + 4 * number : 6 + 4 * number]
        sizes = each["tiles"][0]
        assert tile.startswith(f"{each['pass']}, bf16: B_r × B_c = {sizes['Br']} × {sizes['Bc']} by ")
        assert recipe.startswith("  products: of one warp (mma.sync); ")
        for kernel in each["kernels"]:
            assert f"{kernel['name']} {1e3 * kernel['seconds']:.3g}" in kernels
        assert f"{1e3 * each['predicted_seconds']:.3g} ms, predicted" in kernels
        assert f"{each['hbm_bytes']['kernels'] / 1e6:,.1f} MB between SRAM and HBM" in moved
        assert f"standard attention {each['hbm_bytes']['standard'] / 1e6:,.1f}" in moved
    assert "by the model 19% faster there" in lines[2]  # the last reason of several that speak of this tile
    assert "--verbose" in done.stderr


def test_each_pass_of_a_spec_has_its_reason(file: Path) -> None:
    file.write_text("attention tiny { head_dim 64 mask causal }")
    for device in ("a100", "zen3", "sapphire-rapids"):
        done = flashgen("plan", file, "--device", device)
        titles = [line for line in done.stdout.splitlines() if line.startswith(("forward, ", "backward, "))]
        assert len(titles) == (4 if device != "zen3" else 2)
        assert all("fit" in title for title in titles), titles  # how many blocks fit, or the least of those that do


def test_tables(file: Path) -> None:
    done = flashgen("plan", file, "--device", "a100", "--shape", "1,8,8,1024,2048", "--verbose")
    assert done.code == 0, done.stderr
    for words in (
        "tiny, head_dim 64, on 'a100' (NVIDIA A100 SXM4 80 GB); B,H,Hkv,Nq,Nk = 1,8,8,1024,2048",
        "forward, bf16: KiB of Q 8.0, K 16.0, V 16.0",  # 64 × 128: 128 rows would leave processors without a block
        "MB between SRAM and HBM",
        "Rabe and Staats",
        "the paper's B_c = ⌈M / 4d⌉",
        "1.70 × too much",
        "runners-up",
        "fit a multiprocessor's shared memory",
    ):
        assert words in done.stdout, words


def test_json(file: Path) -> None:
    (found,) = json.loads(flashgen("plan", file, "--device", "h100", "--shape", "1,8,8,1024,1024", "--json").stdout)
    assert found["target"] == "sm_90a"
    assert found["shape"] == {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 1024, "kv_len": 1024}
    forward, backward = found["passes"]
    assert forward["element"] == "bf16"
    assert forward["full_fraction"] < 0.5 < forward["visited_fraction"] < 0.75  # of a causal mask in large tiles
    for each in (forward, backward):
        assert each["predicted_seconds"] > 0
        assert each["hbm_bytes"]["standard"] > each["hbm_bytes"]["kernels"] > each["hbm_bytes"]["least"]
        assert each["runners_up"]


def test_every_device_plans(file: Path) -> None:
    known = [each["name"] for each in json.loads(flashgen("devices", "--json").stdout)]
    for name in (*known, "sm_80", "sm_120"):
        done = flashgen("plan", file, "--device", name, "--shape", "1,2,2,512,512", "--json")
        assert done.code == 0, (name, done.stderr)


def test_an_unknown_device_has_near_ones(file: Path) -> None:
    done = flashgen("plan", file, "--device", "rtx409")
    assert done.code == 2
    assert "'rtx4090'" in done.stderr


@pytest.mark.parametrize("shape", ["0,1,1,5,5", "1,1,1,0,5", "1,1,1,5,0"])
def test_shapes_of_zero(file: Path, shape: str) -> None:
    done = flashgen("plan", file, "--shape", shape)
    assert done.code == 2
    assert f"--shape {shape}: there is nothing to plan for" in done.stderr


def test_memory_that_fits_nothing(file: Path) -> None:
    done = flashgen("plan", file, "--device", "a100", "--sram", 5000)
    assert done.code == 1
    assert "error[E406]" in done.stderr
    assert "even a tile of 16 × 16 needs 8492 bytes (Q 2048; K 2048; V 2048" in done.stderr


def test_devices_say_where_figures_come_from(no_devices_of_ones_own: Path) -> None:
    done = flashgen("devices")
    assert done.code == 0
    assert "sm_70 *" in done.stdout
    assert "  a100: NVIDIA A100 Tensor Core GPU Architecture, whitepaper" in done.stdout
    assert f"{no_devices_of_ones_own} (not there)" in done.stderr


def test_a_device_of_ones_own(file: Path, no_devices_of_ones_own: Path) -> None:
    no_devices_of_ones_own.write_text(
        '[gpu.lab]\ntarget = "sm_80"\nsource = "measured"\nmultiprocessors = 20\nclock_mhz = 1000\nl2_mib = 4\n'
        "memory_gb_per_s = 200\ntensor_16_tflops = 40\nfma_f32_tflops = 2.5\n"
    )
    assert "lab: measured" in flashgen("devices").stdout
    (found,) = json.loads(flashgen("plan", file, "--device", "lab", "--json").stdout)
    assert found["timed_on"] == "lab"


def test_a_malformed_file_is_wrong_usage(file: Path, no_devices_of_ones_own: Path) -> None:
    no_devices_of_ones_own.write_text("[gpu.lab]\ntarget = 3\n")
    for arguments in (("devices",), ("plan", file, "--device", "a100")):
        done = flashgen(*arguments)
        assert done.code == 2
        assert str(no_devices_of_ones_own) in done.stderr
        assert "Traceback" not in done.stderr
    assert flashgen("check", file).code == 0  # nothing to do with devices


def test_ranks_are_simulated(file: Path) -> None:
    asked = ["--device", "a100", "--ranks", "2,8", "--link", "300e9", "--tokens", "1024,4096"]
    done = flashgen("plan", file, *asked)
    assert done.code == 0, done.stderr
    for words in (
        "tiny, head_dim 64, bf16, on 'a100' (NVIDIA A100 SXM4 80 GB); B,H,Hkv = 1,16,16; 300 GB/s a rank",
        "of the busiest rank; all is predicted",
        "4,096 positions a rank",
        "ring, forward: communication",
    ):
        assert words in done.stdout, words
    found = json.loads(flashgen("plan", file, *asked, "--json").stdout)
    assert [(each["ranks"], each["shape"]["q_len"]) for each in found] == [
        (2, 2048),
        (8, 8192),
        (2, 8192),
        (8, 32768),
    ]
    ring = found[1]["methods"][0]
    assert [each["pass"] for each in ring["passes"]] == ["forward", "backward"]
    assert (
        ring["passes"][0]["sent_bytes"]["total"] == sum(14 - rank for rank in range(8)) * 512 * 16 * 2 * 64 * 2
    )  # dealt head and tail


def test_what_a_mask_reads_may_be_a_file(tmp_path: Path) -> None:
    spec = tmp_path / "packed.attn"
    spec.write_text("attention packed { head_dim 64 tensor doc: i32[Nq] mask doc[i] == doc[j] and causal }")
    np.save(tmp_path / "doc.npy", (np.arange(1024) // 100).astype(np.int32))
    asked = ["--device", "a100", "--ranks", "2", "--link", "300e9", "--tokens", "512"]
    done = flashgen("plan", spec, *asked)
    assert "the mask reads 'doc', known only to a call" in done.stdout.replace("\n", " ")
    known = ["--tensor", f"doc={tmp_path / 'doc.npy'}"]
    unknown, found = (json.loads(flashgen("plan", spec, *asked, *more, "--json").stdout)[0] for more in ([], known))
    assert found["unknown"] == []
    assert found["one_device_seconds"]["forward"] < 0.2 * unknown["one_device_seconds"]["forward"]
    np.save(tmp_path / "short.npy", np.zeros(7, np.int32))
    for given, says in (
        ("doc", "'doc' is no NAME=FILE"),
        (f"other={tmp_path / 'doc.npy'}", "the spec declares no such tensor; it has 'doc'"),
        (f"doc={tmp_path / 'none.npy'}", "is no .npy file"),
        (f"doc={tmp_path / 'short.npy'}", "has shape [7]"),
    ):
        done = flashgen("plan", spec, *asked, "--tensor", given)
        assert done.code == 2
        assert says in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "8"], "--ranks goes with --link"),
        (["--tensor", "doc=doc.npy"], "--tensor goes with --ranks"),
        (["--link", "1e9"], "--link goes with --ranks"),
        (["--tokens", "100"], "--tokens goes with --ranks"),
        (["--ranks", "2048", "--link", "1e9"], "--ranks 2048: up to 1024 are simulated"),
        (["--ranks", "two", "--link", "1e9"], "'two' is no list of rank counts"),
        (["--ranks", "8", "--link", "fast"], "'fast' is no number of bytes a second"),
        (["--ranks", "8", "--link", "-1"], "-1 bytes a second are not in the range"),
        (["--ranks", "8", "--link", "1e9", "--shape", "1,1,1,64,32"], "Nq and Nk have to be equal"),
        (["--ranks", "8", "--link", "1e9", "--shape", "1,1,1,4,4"], "4 positions on 8 ranks"),
        (["--ranks", "1024", "--link", "1e9", "--tokens", "1000000"], "tiles are counted up to"),
    ],
)
def test_what_ranks_cannot_be_is_said(file: Path, options: list[str], says: str) -> None:
    done = flashgen("plan", file, *options)
    assert done.code == 2
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
