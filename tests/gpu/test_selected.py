"""``select`` on a GPU: lists for queries and for blocks of them, shared by heads or not, against the dense formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error

cuda: Any = torch.cuda
N, HEADS, GROUPS, BATCH = 1100, 32, 2, 2
TEXT = """
attention on_gpu_{name} {{
    head_dim 64
    dtype bf16, f32
    tensor idx: i32[{declared}, 2]
    select 64: idx[{read}, :]
    mask causal
}}
"""
# How lists are declared, how they are read, and their shape; tiles are found once for those that share them.
LISTS = {
    "blocks": ("B, Hkv, ceildiv(Nq, 64)", "b, hkv, i // 64", (BATCH, GROUPS, 18)),
    "queries": ("B, Hkv, Nq", "b, hkv, i", (BATCH, GROUPS, N)),
    "blocks_for_all": ("B, ceildiv(Nq, 64)", "b, i // 64", (BATCH, 18)),
    "blocks_of_heads": ("B, H, ceildiv(Nq, 64)", "b, h, i // 64", (BATCH, HEADS, 18)),
    "blocks_of_any_entry": ("Hkv, ceildiv(Nq, 128)", "hkv, i // 128", (GROUPS, 9)),
}


def op_of(name: str) -> AttentionOp:
    declared, read, _ = LISTS[name]
    return flashgen.loads(TEXT.format(name=name, declared=declared, read=read), backend="cuda")


def inputs(name: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, N, 64, generator=generator, device="cuda").to(dtype)

    leaves = [random(heads).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    shape = (*LISTS[name][2], 2)
    idx = torch.randint(-2, 20, shape, generator=generator, device="cuda", dtype=torch.int32)
    return leaves, random(HEADS), idx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LISTS)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    op, (leaves, d_o, idx) = op_of(name), inputs(name, dtype)
    o = op(*leaves, idx=idx)
    found = torch.autograd.grad(o, leaves, d_o)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = op.reference(*doubles, idx=idx)
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    assert relative_error(o, exact) < tolerance
    for x, y in zip(found, torch.autograd.grad(exact, doubles, d_o.double()), strict=True):
        assert relative_error(x, y) < tolerance
