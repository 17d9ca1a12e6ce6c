"""What the commands say of GPUs, on a machine without one: plans, targets, devices, the emulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import flashgen

SPEC = "attention tiny { head_dim 16  dtype bf16  mask causal }"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    return path


def test_verify_on_the_emulator(file: Path) -> None:
    done = flashgen("verify", file, "--backend", "emulator", "--shape", "1,2,1,40,72", "--json")
    assert done.code == 0, done.stderr
    ((case,),) = json.loads(done.stdout).values()
    assert [row["tensor"] for row in case["tensors"]] == ["o", "lse", "dq", "dk", "dv"]
    assert set(case["hbm_bytes"]) == {"forward", "backward"}
    for moved in case["hbm_bytes"].values():
        assert moved["predicted"] == moved["counted"] > 0
    table = flashgen("verify", file, "--backend", "emulator", "--shape", "1,2,1,40,72").stdout
    assert f"{case['hbm_bytes']['forward']['counted']:,}" in table


def test_verify_for_a_target_of_the_emulator(file: Path) -> None:
    done = flashgen("verify", file, "--backend", "emulator", "--target", "sm_90a", "--shape", "1,1,1,20,20", "--json")
    assert done.code == 0, done.stderr
    on_its_own = flashgen("verify", file, "--target", "sm_90a")
    assert on_its_own.code == 2
    assert "target 'sm_90a' is for backend='emulator'" in on_its_own.stderr
    unknown = flashgen("verify", file, "--backend", "emulator", "--target", "sm_91a")
    assert unknown.code == 2
    assert "'sm_90a'" in unknown.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_verify_without_a_gpu(file: Path) -> None:
    done = flashgen("verify", file, "--backend", "cuda")
    assert done.code == 2
    assert "backend 'cuda': PyTorch" in done.stderr


def test_plan_for_a_gpu(file: Path) -> None:
    done = flashgen("plan", file, "--device", "h100", "--verbose")
    assert done.code == 0
    assert "forward, bf16" in done.stdout
    assert "KiB of shared memory a block on sm_90a" in done.stdout
    (plan,) = json.loads(flashgen("plan", file, "--device", "sm_86", "--json").stdout)
    assert plan["target"] == "sm_86"
    assert plan["elements"][0]["element"] == "bf16"


def test_unknown_names_have_near_ones(file: Path, tmp_path: Path) -> None:
    for arguments, near in (
        (("build", file, "-o", tmp_path, "--target", "sm_8"), "'sm_80'"),
        (("plan", file, "--device", "h10"), "'h100'"),
    ):
        done = flashgen(*arguments)
        assert done.code == 2
        assert near in done.stderr


def test_devices() -> None:
    known = {each["name"]: each for each in json.loads(flashgen("devices", "--json").stdout)}
    assert known["h100"]["target"] == "sm_90a"
    assert known["a100"]["kind"] == "gpu"
    assert "rtx4090" in flashgen("devices").stdout
