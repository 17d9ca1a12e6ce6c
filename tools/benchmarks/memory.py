"""Peak memory of one forward and backward at 64k tokens, beyond what the process holds before the call.

One head of the spec's head dimension, float32 (bfloat16 where the spec has no float32). Every run is a process of its
own; what libraries allocate once is spent on a small call first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.benchmarks.report import publish

ROOT = Path(__file__).resolve().parents[2]
SPECS = ("causal", "gpt_oss", "packed_documents", "sparse_butterfly", "alibi")
LENGTHS = (16_384, 32_768, 65_536)

RUN = """
import sys
from pathlib import Path
import torch
import flashgen
from flashgen.ir.shape import Shape
from flashgen.verification import random_inputs
from flashgen.op.signature import TORCH_DTYPES

op = flashgen.load(sys.argv[1])
head_dim = op.spec.head_dims[0]
dtype = TORCH_DTYPES[op.spec.dtypes[-1]] if op.spec.dtypes else torch.float32

def inputs(n):
    return random_inputs(op.spec, Shape(1, 1, 1, n, n), head_dim, dtype)

def run(given):
    leaves = {name: x.requires_grad_() for name, x in given.differentiable(op.spec).items()}
    named = {name: leaves.get(name, x) for name, x in given.named.items()}
    o = op(given.q, given.k, given.v, **named)
    torch.autograd.grad(o, list(leaves.values()), given.d_o)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

run(inputs(256))
given = inputs(int(sys.argv[2]))
before = peak()
run(given)
print(peak() - before)
"""


def main() -> None:
    """Measure and publish."""
    rows = [[name, *(f"{peak(name, length) / 1e6:.0f}" for length in LENGTHS)] for name in SPECS]
    rows.append(["one boolean a pair would be", *(f"{length * length / 1e6:.0f}" for length in LENGTHS)])
    publish(
        "memory",
        "make bench",
        ["spec", *(f"{length // 1024}k tokens (MB)" for length in LENGTHS)],
        rows,
        "Peak resident memory of forward and backward beyond the inputs: the output, three gradients and workspaces.",
    )


def peak(name: str, length: int) -> int:
    """Bytes by which the peak of the process grows."""
    command = [sys.executable, "-c", RUN, str(ROOT / "specs" / f"{name}.attn"), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout)


if __name__ == "__main__":
    main()
