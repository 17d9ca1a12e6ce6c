"""Memory is linear in the length: 64k tokens, forward and backward, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import resource, sys
import torch
import flashgen
from flashgen.ir.shape import Shape
from flashgen.verification import random_inputs

path, length = sys.argv[1], int(sys.argv[2])
op = flashgen.load(path)

def run(n):
    inputs = random_inputs(op.spec, Shape(1, 1, 1, n, n), op.spec.head_dims[0], torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.differentiable(op.spec).items()}
    named = {name: leaves.get(name, x) for name, x in inputs.named.items()}
    o = op(inputs.q, inputs.k, inputs.v, **named)
    torch.autograd.grad(o, list(leaves.values()), inputs.d_o)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

run(256)  # what libraries take once
before = peak()
run(length)
print(peak() - before)
"""

TOKENS = 65_536
# q, k, v, o, d_o and three gradients of 64 floats a token, and as much again for copies in flight; a single boolean
# for each pair would take 4.3 GB.
BYTES_A_TOKEN = 2 * 8 * 64 * 4


@pytest.mark.parametrize("name", ["gpt_oss", "packed_documents", "sparse_butterfly"])
def test_64k_tokens(name: str, specs: Path) -> None:
    growth = {length: peak_growth(specs / f"{name}.attn", length) for length in (TOKENS // 2, TOKENS)}
    head_dims = 2 if name == "packed_documents" else 1  # of 64
    assert growth[TOKENS] < TOKENS * BYTES_A_TOKEN * head_dims * 1.5, growth
    assert growth[TOKENS] < 2.5 * growth[TOKENS // 2], growth


def peak_growth(spec: Path, length: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(spec), str(length)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
