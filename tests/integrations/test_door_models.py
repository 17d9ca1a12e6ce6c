"""The benchmark of whole models: losses of every attention agree, and what cannot be timed says why."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tools.benchmarks import doors
from tools.benchmarks.report import Report

TINY = doors.SIZES | {"vocab_size": 89, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2}


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.skipif(doors.ON_GPU, reason="sizes for a CPU")
def test_models_are_timed_by_their_attention(tmp_path: Path) -> None:
    doors.door_models(Report(tmp_path, time.monotonic() + 500), TINY, 64, 16, rounds=3)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["door_models"]
    assert [each["model"] for each in data] == [*doors.MODELS]
    for each in data:
        own, sdpa = each["by"]["flashgen"], each["by"]["sdpa"]
        assert own["tokens a second"] > 0
        if each["model"].startswith("Llama"):
            assert sdpa["tokens a second"] > 0
            assert own["loss"] == pytest.approx(sdpa["loss"], abs=2e-2)
        assert "is not installed" in each["by"][doors.FLASH4]["error"]
