"""Parts of rows on a GPU: kernels that write float32 of 16 bits, the one that adds parts up, and calls made of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.distributed.partial import Exponents, Seen, add_part, first_part
from flashgen.kinds.slices import PARTS
from flashgen.verification.verify import relative_error
from tools.fuzz.parts import in_parts

SPECS = {
    "causal": "attention gpu_parts_causal { head_dim 128 mask causal }",
    "slopes": "attention gpu_parts_slopes { head_dim 40/24 tensor t: f32[H] grad score s - t[h] * abs(i - j) }",
    "sigmoid": "attention gpu_parts_sigmoid { head_dim 33 weights sigmoid(s) mask window(60) }",
    "wide": "attention gpu_parts_wide { head_dim 320 weights normalize(exp(s)) mask causal }",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_in_float32_is_what_others_round(name: str, dtype: torch.dtype) -> None:
    op: Any = flashgen.loads(SPECS[name], backend="cuda")
    (head_dim,) = op.spec.head_dims
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

    q, d_o = drawn(2, 4, 333, head_dim.qk), drawn(2, 4, 333, head_dim.v)
    k, v = drawn(2, 2, 470, head_dim.qk), drawn(2, 2, 470, head_dim.v)
    captured = [drawn(4).float() for _ in op.spec.tensors]
    tensors, offsets = (q, k, v, *captured), (137, 0, 0, 0, 470, 470, 2, 4)
    needs = [True] * len(tensors)
    for repeats in (False, True):
        o, lse, extremes = op.engine.attend(tensors, (offsets, repeats))
        wide, of_parts, _ = op.engine_of(PARTS).attend(tensors, (offsets, repeats))
        assert wide.dtype is torch.float32
        assert torch.equal(wide.to(dtype), o)
        assert lse is None or torch.equal(lse, of_parts)
        rows = (None, o, lse, extremes) if lse is not None else (None,) * 4
        wide_rows = (None, o.float(), lse, extremes) if lse is not None else (None,) * 4
        gradients = op.engine.gradients(d_o, rows, tensors, (offsets, repeats), needs)
        sums = op.engine_of(PARTS).gradients(d_o, wide_rows, tensors, (offsets, repeats), needs, is_part=True)
        for x, y in zip(gradients, sums, strict=True):
            assert y.dtype is torch.float32
            assert relative_error(x, y.double()) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [8, 33, 128])
def test_the_kernel_adds_parts_as_operators_do(width: int) -> None:
    """Rows that are some of others, among them such as see no key."""
    generator = torch.Generator().manual_seed(0)
    exponents = Exponents(0.2, 1.0)
    whole = torch.zeros(2, 3, 50, width)
    parts = []
    for n in range(3):
        lse = 9 * torch.randn(2, 3, 40, generator=generator)
        lse[:, :, n], lse[:, :, 5] = -torch.inf, -torch.inf
        extremes = torch.zeros(2, 3, 40, 2)
        extremes[:, :, 7] = torch.tensor([1e6 + n, 2.0 * n])
        parts.append((torch.randn(2, 3, 40, width, generator=generator), lse, extremes))

    def added(device: str) -> Seen:
        (o, lse, extremes), *more = ((o.to(device), lse.to(device), far.to(device)) for o, lse, far in parts)
        first = first_part(o, lse, extremes, exponents)
        rows = whole.to(device)[:, :, 5:45]
        rows.copy_(first.o)
        found = Seen(rows, first.log, first.top)
        for each in more:
            add_part(found, *each, exponents)
        return found

    truth, found = added("cpu"), added("cuda")
    torch.testing.assert_close(found.log.cpu(), truth.log, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.top.cpu(), truth.top)
    torch.testing.assert_close(found.o.cpu(), truth.o, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_calls_in_parts(name: str, wide: bool) -> None:
    op: Any = flashgen.loads(SPECS[name], backend="cuda")
    (head_dim,) = op.spec.head_dims
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((4, head_dim.qk), (2, head_dim.qk), (2, head_dim.v), (4, head_dim.v))
    q, k, v, d_o = (
        torch.randn(1, heads, 300, width, generator=generator, device="cuda").bfloat16() for heads, width in shapes
    )
    captured = {each.name: torch.rand(4, generator=generator, device="cuda") for each in op.spec.tensors}

    def step(call: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *captured.values())]
        o = call(*leaves[:3], **dict(zip(captured, leaves[3:], strict=True)))
        return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]

    merged = step(lambda *given, **more: in_parts(op, 3, wide, *given, **more))
    for x, y in zip(merged, step(op), strict=True):
        assert relative_error(x, y.double()) <= 3e-2
