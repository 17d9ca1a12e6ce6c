"""Small calls of representative specs under compute-sanitizer: accesses, races, uninitialised memory, barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
ROOT = Path(__file__).resolve().parents[2]
CALLS = """
import sys
import torch
from flashgen.ir.shape import Shape
from tests.gpu.helpers import arguments, operator, results
for name in ("causal", "alibi", "gemma2_local", "gpt_oss"):
    op = operator(name)
    inputs = arguments(op, Shape(1, 2, 1, 150, 150))
    for deterministic in (False, True):
        results(op, inputs, deterministic=deterministic)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(check: str) -> None:
    if TOOL is None:
        pytest.skip("needs compute-sanitizer")
    # Without PyTorch's cache of memory every tensor is an allocation of its own, whose bounds the tool knows.
    done = subprocess.run(
        [TOOL, f"--tool={check}", "--error-exitcode=9", sys.executable, "-c", CALLS],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
