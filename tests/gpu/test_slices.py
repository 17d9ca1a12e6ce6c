"""Slices of rows on a GPU: kernels that write o, lse and dq into larger tensors, and gradients of keys in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.kinds.slices import SLICES
from flashgen.verification.verify import relative_error

SPECS = {
    "causal": "attention gpu_slices_causal { head_dim 128 mask causal }",
    "slopes": "attention gpu_slices_slopes { head_dim 40/24 tensor t: f32[H] grad score s - t[h] * abs(i - j) }",
    "sigmoid": "attention gpu_slices_sigmoid { head_dim 33 weights sigmoid(s) mask window(60) }",
    "wide": "attention gpu_slices_wide { head_dim 320 weights normalize(exp(s)) mask causal }",
}
BEFORE, ROWS, BEHIND = 13, 333, 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_among_others_is_what_others_write(name: str, dtype: torch.dtype) -> None:
    op: Any = flashgen.loads(SPECS[name], backend="cuda")
    (head_dim,) = op.spec.head_dims
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

    def larger(like: Tensor | None) -> Any:
        if like is None:
            return None
        sizes = (*like.shape[:2], BEFORE + ROWS + BEHIND, *like.shape[3:])
        return torch.full(sizes, 7.0, dtype=like.dtype, device="cuda")

    q, d_o = drawn(2, 4, ROWS, head_dim.qk), drawn(2, 4, ROWS, head_dim.v)
    k, v = drawn(2, 2, 470, head_dim.qk), drawn(2, 2, 470, head_dim.v)
    tensors = (q, k, v, *[drawn(4).float() for _ in op.spec.tensors])
    at, offsets, needs = slice(BEFORE, BEFORE + ROWS), (137, 0, 0, 0, 470, 470, 2, 4), [True] * len(tensors)
    for repeats in (False, True):
        o, lse, extremes = op.engine.attend(tensors, (offsets, repeats))
        wholes = [larger(x) for x in (o, lse, extremes, q)]
        own: list[Any] = [None if x is None else x[:, :, at] for x in wholes]
        op.engine_of(SLICES).attend(tensors, (offsets, repeats), into=tuple(own[:3]))
        assert torch.equal(own[0], o)
        assert lse is None or torch.equal(own[1], lse)
        into = (own[3], *(torch.full(x.shape, 7.0, device="cuda") for x in (k, v)))
        rows = (None, *own[:3])
        found = op.engine_of(SLICES).gradients(d_o, rows, tensors, (offsets, repeats), needs, is_part=True, into=into)
        wanted = op.engine.gradients(d_o, (None, o, lse, extremes), tensors, (offsets, repeats), needs)
        for x, y in zip(wanted, found, strict=True):
            assert relative_error(x, y.double()) <= 2 * torch.finfo(dtype).eps
        for whole in wholes:
            if whole is not None:
                whole[:, :, at] = 7.0
                assert bool((whole == 7.0).all())
