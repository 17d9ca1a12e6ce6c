"""The commands that plan, run and measure a spec, and those about the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashgen import verification
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.verification import Case, Row
from tests.cli.helpers import flashgen

SMALL = ("--shape", "1,2,1,9,17")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("specs") / "two.attn"
    file.write_text(
        "attention first { head_dim 32 dtype f32, bf16 tensor slope: f32[H] grad score s - slope[h] * abs(i - j) }\n"
        "attention second { head_dim 16 dtype f32 mask causal weights sigmoid(s) }\n"
    )
    return file


def test_verify_shows_every_result(spec: Path) -> None:
    outcome = flashgen("verify", spec, *SMALL)
    assert outcome.code == 0, outcome.stdout
    first, _, second = outcome.stdout.partition("second:")
    for tensor in ("o", "lse", "dq", "dk", "dv", "dslope"):
        assert len(re.findall(rf" {tensor} .* ok$", first, re.MULTILINE)) == 2, tensor
    assert " lse " not in second
    assert "16 of 16 tensors within tolerance" in outcome.stderr


def test_verify_as_json(spec: Path) -> None:
    outcome = flashgen("verify", spec, *SMALL, "--name", "first", "--json")
    (case, _) = json.loads(outcome.stdout)["first"]
    assert case["shape"] == [1, 2, 1, 9, 17]
    row = case["tensors"][0]
    assert row["tensor"] == "o"
    assert row["ok"] is True
    assert row["error"] <= row["tolerance"]


def test_verify_has_a_table_of_8_bits(tmp_path: Path) -> None:
    file = tmp_path / "narrow.attn"
    file.write_text("attention narrow { head_dim 32 dtype f32, f8e4m3 mask causal }\nattention wide { head_dim 32 }\n")
    outcome = flashgen("verify", file, *SMALL, "--backend", "reference")
    assert outcome.code == 0
    (table,) = re.findall(r"^(\w+) of 8 bits: relative error", outcome.stdout, re.MULTILINE)
    assert table == "narrow"
    asked = flashgen("verify", file, *SMALL, "--backend", "reference", "--f8", "--json")
    (*_, case) = json.loads(asked.stdout)["wide"]
    assert case["dtype"] == "f8e4m3"
    assert [row["tensor"] for row in case["tensors"]] == ["o", "lse"]
    for row in case["tensors"]:
        assert row["wide"] < row["error"] < 0.2
        assert row["rounding"] <= row["tolerance"]
    file.write_text("attention other { head_dim 32 dtype f32 }\n")
    refused = flashgen("verify", file, *SMALL, "--f8")
    assert refused.code == 2
    assert "'other' names no f8e4m3 in its dtype statement" in refused.stderr


@pytest.mark.parametrize("shape", ["0,2,2,5,5", "1,2,2,0,5", "1,2,2,5,0", "1,2,2,0,0"])
def test_verify_without_anything_to_attend_to(spec: Path, shape: str) -> None:
    assert flashgen("verify", spec, "--shape", shape).code == 0


def test_verify_on_the_reference(spec: Path) -> None:
    assert flashgen("verify", spec, *SMALL, "--backend", "reference").code == 0


def test_a_result_beyond_tolerance_exits_with_1(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> Iterator[Case]:
        yield Case(HeadDim(32, 32), ElementType.F32, Shape(1, 1, 1, 1, 1), (Row("dq", 0.5, 1e-7, 2e-5),))

    monkeypatch.setattr(verification, "verify", wrong)
    outcome = flashgen("verify", spec, "--name", "second")
    assert outcome.code == 1
    assert re.search(r"dq +5\.0e-01 +1\.0e-07 +2\.0e-05 +FAIL", outcome.stdout)
    assert "0 of 1 tensors within tolerance" in outcome.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_backend_that_is_not_there_is_wrong_usage(spec: Path) -> None:
    outcome = flashgen("verify", spec, *SMALL, "--backend", "cuda")
    assert outcome.code == 2
    assert "cuda" in outcome.stderr


def test_a_shape_that_the_spec_refuses_is_wrong_usage(tmp_path: Path) -> None:
    file = tmp_path / "square.attn"
    file.write_text("attention square { head_dim 16 tensor t: f32[Nk] score s + t[i] }")
    outcome = flashgen("verify", file, "--shape", "1,1,1,20,10")
    assert outcome.code == 2
    assert "'t'" in outcome.stderr


def test_plan_gives_its_reasons(spec: Path) -> None:
    outcome = flashgen("plan", spec, "--device", "zen3")
    assert outcome.code == 0
    assert "first, head_dim 32, on 'zen3'" in outcome.stdout
    assert "second, head_dim 16, on 'zen3'" in outcome.stdout
    assert "B_r × B_c = " in outcome.stdout


def test_plan_as_json_follows_the_sram(spec: Path) -> None:
    plans = {}
    for sram in (2**16, 2**21):
        outcome = flashgen("plan", spec, "--device", "generic", "--sram", sram, "--json")
        plans[sram] = json.loads(outcome.stdout)[0]
    small, large = plans[2**16], plans[2**21]
    assert small["sram_bytes"] == 2**16
    assert small["forward"]["Br"] * small["forward"]["Bc"] < large["forward"]["Br"] * large["forward"]["Bc"]
    assert large["reasons"]


def test_bench_compares_in_the_same_run(spec: Path) -> None:
    outcome = flashgen("bench", spec, *SMALL, "--name", "first", "--json")
    assert outcome.code == 0, outcome.stderr
    forward, both = json.loads(outcome.stdout)["first"]
    assert (forward["pass"], both["pass"]) == ("forward", "forward+backward")
    own, dense = forward["times"]
    assert (own["name"], dense["name"]) == ("flashgen", "dense")
    assert own["ratio"]["median"] == 1
    for times in (own, dense):
        assert times["gflops"] == pytest.approx(forward["flops"] / times["seconds"]["median"] / 1e9)
        assert 0 < times["of_gemm"] < 2
    assert forward["gemm"]["gflops"] > 1
    assert both["flops"] == pytest.approx(3.5 * forward["flops"])
    assert own["seconds"]["low"] <= own["seconds"]["median"] <= own["seconds"]["high"]
    assert "sdpa" in forward["absent"]


def test_bench_says_why_a_peer_is_missing(spec: Path) -> None:
    outcome = flashgen("bench", spec, *SMALL, "--name", "second")
    assert outcome.code == 0
    assert "forward+backward" in outcome.stdout
    assert "no sdpa for 'second': it computes a plain softmax only" in outcome.stderr


# PyTorch's compiler warns of its own affairs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_bench_compiles_flex_once_and_forward_only(spec: Path) -> None:
    outcome = flashgen("bench", spec, *SMALL, "--name", "first", "--vs", "flex", "--json")
    forward, both = json.loads(outcome.stdout)["first"]
    assert [times["name"] for times in forward["times"]] == ["flashgen", "flex"]
    assert forward["first_call_seconds"]["flex"] > forward["times"][1]["seconds"]["median"]
    assert [times["name"] for times in both["times"]] == ["flashgen"]
    assert both["absent"] == {"flex": "it has no backward on a CPU"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bench_shows_the_share_of_a_matrix_product(spec: Path) -> None:
    outcome = flashgen("bench", spec, *SMALL, "--name", "first", "--vs", "sdpa,flex")
    assert "of sgemm" in outcome.stdout
    assert "GFLOP/s; " in outcome.stderr
    assert "compiled for" in outcome.stderr
    assert "no flex for 'first': it has no backward on a CPU" in outcome.stderr


def test_devices() -> None:
    outcome = flashgen("devices", "--json")
    local, *others = json.loads(outcome.stdout)
    assert local["name"] == "local"
    assert local["cores"] >= 1
    assert "generic" in {device["name"] for device in others}
    for device in others:
        assert device["name"] in flashgen("devices").stdout


def test_cache_lists_and_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    empty = json.loads(flashgen("cache", "--json").stdout)
    assert empty == {"folder": str(tmp_path / "cache"), "entries": [], "tuned": []}
    assert not (tmp_path / "cache").exists()
    file = tmp_path / "one.attn"
    file.write_text("attention one { head_dim 16 }")
    assert flashgen("build", file, "-o", tmp_path / "out").code == 0
    (entry,) = json.loads(flashgen("cache", "--json").stdout)["entries"]
    assert entry["size"] > 0
    assert "one_d16_cpu" in flashgen("cache").stdout
    assert flashgen("cache", "clear").code == 0
    assert json.loads(flashgen("cache", "--json").stdout)["entries"] == []


def test_a_cache_that_others_can_write_is_said_not_to_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    assert "nothing of this is used" not in flashgen("cache").stderr
    tmp_path.chmod(0o1777)
    outcome = flashgen("cache", "--json")
    assert outcome.code == 0
    assert "nothing of this is used" in outcome.stderr
    assert str(tmp_path) in outcome.stderr


def test_verify_to_the_second_order(spec: Path) -> None:
    outcome = flashgen("verify", spec, *SMALL, "--order", "2", "--backend", "reference", "--json")
    assert outcome.code == 0, outcome.stderr
    case, _ = json.loads(outcome.stdout)["first"]
    names = [row["tensor"] for row in case["tensors"]]
    assert names[:2] == ["o", "lse"]
    assert {"t_o", "t_lse", "ddq", "ddk", "ddv", "dd_o", "dd_lse"} <= set(names)
    for shape in ("0,2,2,5,5", "1,2,2,0,5", "1,2,2,5,0"):
        assert flashgen("verify", spec, "--shape", shape, "--order", "2", "--backend", "reference").code == 0
    assert flashgen("verify", spec, "--order", "3").code == 2
