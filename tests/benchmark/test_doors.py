"""The benchmark of doors: each is timed on the attention that the op computes, and what is missing is said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks import doors
from tools.benchmarks.gpu_rows import Row
from tools.benchmarks.report import Report

pytestmark = pytest.mark.skipif(doors.ON_GPU, reason="sizes for a CPU")


def data_of(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report.folder / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_door_is_timed_and_computes_the_same(tmp_path: Path) -> None:
    report = Report(tmp_path, time.monotonic() + 300)
    row = Row("causal", "mask causal", (64, 64), 96, 2, 4, 2)
    doors.doors(report, [row], rounds=3)
    (found,) = data_of(report)["doors"]
    assert found["size"] == "2×4/2×96×64"
    for name in (*doors.OWN, *doors.PEERS):
        own = found["milliseconds"][name]
        if name == "FlashAttention-4" or (name == "transformers" and isinstance(own["forward"], str)):
            assert "Error: " in own["forward"]
            continue
        for part in doors.PASSES:
            if name.startswith("FlexAttention") and part != "forward":
                assert "backward on CPU" in own[part]
                continue
            assert own[part] > 0
            assert own.get(f"{part} differs", 0.0) < 1e-2, (name, part)
    assert "cannot: ModuleNotFoundError" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_doors_add_to_a_call(tmp_path: Path) -> None:
    report = Report(tmp_path, time.monotonic() + 300)
    doors.door_calls(report, seconds=0.05)
    found = data_of(report)["door_calls"]
    assert (
        {"op", "op.varlen", "flex", "flash", "flash, varlen", "nn"}
        <= set(found["forward"])
        == set(found["with backward"])
    )
    assert all(value > 0 for part in found.values() for value in part.values())
