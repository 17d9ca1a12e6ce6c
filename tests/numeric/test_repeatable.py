"""``deterministic=True`` on CPUs: the same bits on any number of threads, and again and again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.ir.shape import Shape
from flashgen.op.op import AttentionOp
from flashgen.verification.inputs import random_inputs

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

THREADS = (1, 2, 3, 5)
SPECS = {
    "causal": "head_dim 16 mask causal",
    "plain": "head_dim 16",
    "learned": """
        head_dim 16
        param gain: f32 = 1.0 grad
        tensor table: f32[H, 40] grad
        tensor sink: f32[H] grad
        score gain * s + table[h, clamp(i - j, 0, 39)]
        mask causal
        weights softmax(sink = sink[h])
    """,
    "shared": "head_dim 16 tensor table: f32[40] grad score s + table[clamp(i - j, 0, 39)] mask causal",
    # Too large for a copy for each task.
    "pairs": "head_dim 16 tensor bias: f32[Nq, Nk] grad score s + bias[i, j] mask causal",
    "distances": "head_dim 16 param width: f32 = 3.0 grad score -sqdist / width",
    "dropped": "head_dim 16 tensor doc: i32[B, Nq] mask same_document(doc) dropout 0.2",
}
# B, H, Hkv, Nq, Nk: one chunk a head, chunks of few rows, of many, and of heads that share keys.
SHAPES = [(1, 1, 1, 40, 40), (2, 3, 3, 333, 333), (1, 4, 2, 1200, 1200), (1, 1, 1, 2100, 2100)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(op: AttentionOp, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """o and every gradient."""
    inputs = random_inputs(op.spec, Shape(*shape), op.spec.head_dims[0], dtype)
    learned = {name: x.detach().requires_grad_() for name, x in inputs.differentiable(op.spec).items()}
    arguments = {**inputs.named, **{name: x for name, x in learned.items() if name not in ("q", "k", "v")}}
    if op.spec.dropout is not None:
        arguments["seed"] = 7
    o = op(learned["q"], learned["k"], learned["v"], deterministic=True, **arguments)
    return o.detach(), *torch.autograd.grad(o, list(learned.values()), inputs.d_o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    op = flashgen.loads(f"attention repeatable_{name} {{ {SPECS[name]} }}", backend="cpu")
    for shape in SHAPES:
        expected: tuple[Tensor, ...] = ()
        for threads in THREADS:
            torch.set_num_threads(threads)
            found = results(op, shape, dtype)
            expected = expected or found
            same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
            assert all(same), f"{shape} on {threads} threads: {same}"
