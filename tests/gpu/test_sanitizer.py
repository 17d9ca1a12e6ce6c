"""Small calls of representative specs under compute-sanitizer: accesses, races, uninitialised memory, barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("causal", "alibi", "gemma2_local", "gpt_oss", "packed_documents")
CALLS = f"""
import os
import torch
from flashgen.ir.shape import Shape
from tests.gpu.helpers import arguments, operator, results
for name in {NAMES}:
    op = operator(name)
    inputs = arguments(op, Shape(1, 2, 1, 150, 150))
    for deterministic in (False, True):
        results(op, inputs, deterministic=deterministic)
torch.cuda.synchronize()
print("done", flush=True)
os._exit(0)  # under the tool PyTorch's threads do not survive the end of the interpreter
"""
# Without PyTorch's cache of memory every tensor is an allocation of its own, whose bounds the tool knows.
ENVIRONMENT = {
    **os.environ,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
}
LONGEST = 420  # seconds

# No connection is made before CUDA starts, for which Python needs longer than the tool waits; and PyTorch asks for
# functions that a driver may lack, which is no error of a kernel's.
OPTIONS = ("--launch-timeout=0", "--target-processes=application-only", "--error-exitcode=9", "--print-limit=20")
OWN_KERNELS = tuple(f"--kernel-name=kns={name}_d" for name in NAMES)  # PyTorch's are not checked, which takes long
CHECKS: Mapping[str, Sequence[str]] = {
    "memcheck": ("--report-api-errors=no", *OWN_KERNELS),
    "racecheck": OWN_KERNELS,
    "initcheck": (),  # what PyTorch's kernels write is initialised, too
    "synccheck": OWN_KERNELS,
}


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels are in the cache: under the tool compiling takes minutes."""
    run()


@pytest.mark.timeout(2 * LONGEST + 60)
@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("check", CHECKS)
def test_compute_sanitizer(check: str) -> None:
    assert TOOL is not None
    run(TOOL, f"--tool={check}", *OPTIONS, *CHECKS[check])


def run(*tool: str) -> None:
    """The calls in a process of their own, under a tool or without; fails with what was printed."""
    try:
        done = subprocess.run(
            [*tool, sys.executable, "-c", CALLS],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LONGEST,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        left = (late.stdout or b"").decode(errors="replace")
        pytest.fail(f"not done after {LONGEST} s:\n{left[-6000:]}")
    # Its summary comes last, its first findings first.
    printed = done.stdout if len(done.stdout) < 12000 else f"{done.stdout[:9000]}\n…\n{done.stdout[-3000:]}"
    assert done.returncode == 0, printed
    assert "done" in done.stdout, printed
