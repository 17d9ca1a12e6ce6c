"""Every spec of the gallery on the GPU, forward and every gradient, against the float64 reference."""

from __future__ import annotations

import random

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification import fitting
from flashgen.verification.verify import verify_case
from tests.gpu.helpers import operator, spec_of
from tests.numeric.helpers import GALLERY, dtypes, failures

SHAPES = (
    Shape(1, 2, 2, 1, 1),
    Shape(1, 2, 2, 113, 113),
    Shape(2, 4, 2, 1, 130),
    Shape(1, 2, 2, 77, 203),
    Shape(2, 3, 1, 333, 97),
    Shape(1, 6, 2, 1023, 1023),
)


CASES = [(name, dtype) for name in GALLERY for dtype in dtypes(spec_of(name))]


# One test for each binary, so that no two processes wait for the same one.
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_gallery(name: str, dtype: ElementType) -> None:
    op = operator(name)
    found = [
        failures(verify_case(op, head_dim, dtype, fitting(op.spec, shape), device="cuda"))
        for head_dim in op.spec.head_dims
        for shape in SHAPES
    ]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("head_dim", [8, 16, 17, 20, 32, 33, 48, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_head_dimensions(head_dim: int, dtype: str) -> None:
    """No head dimension up to 256 runs out of a GPU's resources, divisible by anything or not."""
    op = flashgen.loads(f"attention any {{ head_dim {head_dim}  dtype {dtype}  mask causal }}", backend="cuda")
    case = verify_case(op, op.spec.head_dims[0], ElementType(dtype), Shape(1, 4, 2, 150, 190), device="cuda")
    assert case.ok, failures(case)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed: int) -> None:
    chosen = random.Random(seed)
    op = operator(chosen.choice(GALLERY))
    kv_heads = chosen.choice((1, 2, 3))
    length = chosen.choice((1, 64, 500, 2000))
    shape = fitting(
        op.spec,
        Shape(
            chosen.choice((1, 2, 5)),
            kv_heads * chosen.choice((1, 2, 4)),
            kv_heads,
            chosen.randint(1, length),
            chosen.randint(2, length + 2),
        ),
    )
    case = verify_case(
        op, chosen.choice(op.spec.head_dims), chosen.choice(dtypes(op.spec)), shape, seed=seed, device="cuda"
    )
    assert case.ok, failures(case)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_storage_that_starts_anywhere(offset: int) -> None:
    """Rows that do not start at multiples of 16 bytes are right, if slower."""
    op = operator("causal")
    shape, count = (2, 3, 70, 64), 2 * 3 * 70 * 64
    generator = torch.Generator("cuda").manual_seed(offset)
    q, k, v, d_o = (
        torch.randn(count + offset, generator=generator, device="cuda").bfloat16()[offset:].view(shape)
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    aligned = [x.detach().clone().requires_grad_() for x in leaves]
    own, expected = op(*leaves), op(*aligned)
    assert torch.equal(own, expected)
    for first, second in zip(
        torch.autograd.grad(own, leaves, d_o), torch.autograd.grad(expected, aligned, d_o.clone()), strict=True
    ):
        torch.testing.assert_close(first, second)


def test_layouts() -> None:
    """[B, N, H, D] tensors, views of one packed tensor, and heads that are shared by a stride of 0."""
    op = operator("causal")
    packed = torch.randn(2, 90, 3, 4, 64, device="cuda", dtype=torch.float16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    assert torch.equal(op(q, k, v), op(q.contiguous(), k.contiguous(), v.contiguous()))
    shared = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(op(q, shared, v), op(q, shared.contiguous(), v))
    assert torch.equal(op(q.mT.contiguous().mT, k, v), op(q, k, v)), "columns first: copied"


def test_more_than_2_to_the_31_elements() -> None:
    """A call on tensors that 32 bits cannot index is several launches."""
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    batch, heads, length = 9, 2, 2**20  # 9 · 2 · 2^20 · 128 elements, 4.8 GB each
    q = torch.randn(batch, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    window = flashgen.loads(
        "attention near { head_dim 128  dtype bf16  mask causal and window_left(64) }", backend="cuda"
    )
    o = window(q, q, q)
    for b in (0, batch - 1):
        part = window(q[b : b + 1], q[b : b + 1], q[b : b + 1])
        assert torch.equal(o[b : b + 1], part)
    del o, part
    q = q[:, :1].reshape(1, batch, length, 128)
    interleaved = q.transpose(1, 2).contiguous().transpose(1, 2)  # rows of one head 9 · 128 elements apart
    few = slice(length - 200, length)
    assert torch.equal(window(interleaved, interleaved, interleaved)[:, :, few], window(q, q, q)[:, :, few])


def test_cpu_tensors_beside() -> None:
    """An op without a backend takes tensors of both kinds."""
    op = flashgen.loads("attention both { head_dim 32  mask causal }")
    q = torch.randn(1, 2, 50, 32)
    torch.testing.assert_close(op(q.cuda(), q.cuda(), q.cuda()).cpu(), op(q, q, q), rtol=1e-4, atol=1e-5)
    assert op.backends == ("cpu", "cuda", "reference")


@pytest.mark.parametrize("width", ["20", "64", "128", "192/128", "256"])
@pytest.mark.parametrize(
    "mask", ["", "mask causal", "mask causal and window_left(100)"], ids=["all", "causal", "window"]
)
def test_squared_distances(width: str, mask: str) -> None:
    """Who takes norms of keys follows from the mask and from the head dimension."""
    op = flashgen.loads(f"attention near {{ head_dim {width}  score -sqdist / 16  {mask} }}", backend="cuda")
    for dtype in (ElementType.BF16, ElementType.F16):
        case = verify_case(op, op.spec.head_dims[0], dtype, Shape(1, 4, 2, 551, 603), device="cuda")
        assert case.ok, failures(case)
