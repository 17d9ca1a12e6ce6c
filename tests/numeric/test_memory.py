"""Memory is linear in the length: 64k tokens, forward and backward, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from pathlib import Path
import torch
import flashgen
from flashgen.ir.shape import Shape
from flashgen.verification import random_inputs

op = flashgen.load(sys.argv[1])

def run(n):
    inputs = random_inputs(op.spec, Shape(1, 1, 1, n, n), op.spec.head_dims[0], torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.differentiable(op.spec).items()}
    named = {name: leaves.get(name, x) for name, x in inputs.named.items()}
    o = op(inputs.q, inputs.k, inputs.v, **named)
    torch.autograd.grad(o, list(leaves.values()), inputs.d_o)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

run(256)  # what libraries take once
before = peak()
run(int(sys.argv[2]))
print(peak() - before)
"""

TOKENS = 65_536
# q, k, v, d_o, o and three gradients, and as much again for workspaces; a boolean for each pair would take 4.3 GB.
ROWS = 16


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("name", "head_dim"), [("gpt_oss", 64), ("packed_documents", 128), ("sparse_butterfly", 64)])
def test_64k_tokens(name: str, head_dim: int, specs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(specs / f"{name}.attn"), str(TOKENS)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert 0 < grown < ROWS * TOKENS * head_dim * 4, f"{grown / 1e6:.0f} MB"
