"""A new mask tensor each step: nothing is compiled again, and memory does not grow."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.toolchains import cpp as compiler
from tests.numeric.helpers import normal

STEPS = 1000
SPEC = """
attention steps {
    head_dim 16
    tensor doc: i32[B, Nk]
    tensor keep: bool[H, ceildiv(Nq, 16), ceildiv(Nk, 16)]
    mask causal and same_document(doc)
    layout block 16: keep[h, I, J]
}
"""


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    op = flashgen.loads(SPEC)
    q, k, v = (normal(1, 2, 96, 16, seed=seed).requires_grad_() for seed in range(3))
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        doc = torch.randint(-3, 4, (1, 96), dtype=torch.int32, generator=generator)
        keep = torch.rand(2, 6, 6, generator=generator) < 0.5
        torch.autograd.grad(op(q, k, v, doc=doc, keep=keep).sum(), (q, k, v))

    def measured() -> tuple[int, int]:
        gc.collect()
        return resident(), tracemalloc.get_traced_memory()[0]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a step compiled something")

    for _ in range(100):  # allocators and caches settle
        step()
    monkeypatch.setattr(compiler, "compile_sources", refuse)
    monkeypatch.setattr(compiler, "_compile", refuse)
    tracemalloc.start()
    step()
    before = measured()
    for _ in range(STEPS):
        step()
    after = measured()
    tracemalloc.stop()
    assert after[0] - before[0] < 4 << 20, "resident memory grew"
    assert after[1] - before[1] < 64 << 10, "Python's memory grew"
