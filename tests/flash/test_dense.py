"""``flash_attn_func`` against FlashAttention's formula, written here densely in float64, and what it refuses."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.flash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from tests.slices import one_of

# Sums of some 40 products of float32 numbers of size 1, and gradients of size 10: rounding stays below 1e-5 of them.
TOLERANCE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and lse as FlashAttention's documentation defines them."""
    (batch, q_len, heads, width), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(width) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(q_len)[:, None] + kv_len - q_len
    j = torch.arange(kv_len)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(batch, heads)
        s = s - slopes[:, :, None, None] * (at - j).abs()
    left, right = window_size
    kept = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        kept &= j <= at
    if left >= 0:
        kept &= j >= at - left
    if right >= 0:
        kept &= j <= at + right
    lse = s.masked_fill(~kept, -math.inf).logsumexp(-1)
    if s_aux is not None:
        lse = torch.logaddexp(lse, s_aux.double()[:, None])
    weights = torch.where(kept, torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def inputs(q_len: int, kv_len: int, heads: int = 4, kv_heads: int = 2, width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len * 100 + kv_len)
    shapes = [(2, q_len, heads, width), (2, kv_len, kv_heads, width), (2, kv_len, kv_heads, width)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_equal(leaves: list[Tensor], options: dict[str, Any]) -> None:
    """o, lse and every gradient, also what arrives through lse."""
    q, k, v = leaves[:3]
    o, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    scale = options.pop("softmax_scale", None)
    wanted_o, wanted_lse = formula(q, k, v, scale=scale, **options)
    assert o.shape == wanted_o.shape
    assert lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), wanted_o, **TOLERANCE)
    torch.testing.assert_close(lse.double(), wanted_lse, **TOLERANCE)
    d_o = torch.linspace(-1, 1, o.numel()).reshape(o.shape)
    seen = wanted_lse.detach() > -math.inf
    got = torch.autograd.grad((o * d_o).sum() + lse[seen].sum(), leaves)
    wanted = torch.autograd.grad((wanted_o * d_o).sum() + wanted_lse[seen].sum(), leaves)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (1, 41), (17, 70), (70, 17)])
@pytest.mark.parametrize(
    "options",
    one_of(
        2,
        [
            {"causal": True, "window_size": (5, 3)},
            {"causal": True},
            {"causal": True, "softcap": 2.0},
            {"window_size": (4, 7), "softmax_scale": 0.3},
            {},
            {"window_size": (0, -1)},
        ],
    ),
    ids=str,
)
def test_the_formula(q_len: int, kv_len: int, options: dict[str, Any]) -> None:
    assert_equal(inputs(q_len, kv_len), dict(options))


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_alibi_and_their_gradients(shape: tuple[int, ...], causal: bool) -> None:
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
    leaves = [*inputs(19, 37), slopes]
    assert_equal(leaves, {"alibi_slopes": slopes, "causal": causal})


@pytest.mark.parametrize(("q_len", "kv_len"), [(19, 37), (37, 19)])
def test_sinks_and_their_gradients(q_len: int, kv_len: int) -> None:
    """Also where rows have no key, of which the sink is all of the denominator."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(7)).requires_grad_()
    assert_equal([*inputs(q_len, kv_len), sinks], {"s_aux": sinks, "causal": True})


def test_heads_of_keys_and_head_dimension_of_values() -> None:
    q, k, _ = inputs(9, 21, heads=6, kv_heads=1)
    v = torch.randn(2, 21, 1, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_equal([q, k, v], {"causal": True})


def test_windows_beyond_the_lengths_are_none() -> None:
    q, k, v = inputs(17, 70)
    for window in ((1000, 1000), (-1, -1), (-5, -1)):
        torch.testing.assert_close(
            flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v), rtol=0, atol=1e-6
        )


def test_windows_of_the_largest_ints_are_none() -> None:
    """Sums of them and positions leave 32 bits: keys were lost."""
    q, k, v = inputs(9, 7)
    o, lse = formula(q, k, v)
    for window in ((-1, 2**31 - 1), (2**31 - 1, -1), (2**31 - 1, 2**31 - 1), (sys.maxsize, sys.maxsize), (2**30,) * 2):
        got, sums, _ = flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
        torch.testing.assert_close(got.double(), o, **TOLERANCE)
        torch.testing.assert_close(sums.double(), lse, **TOLERANCE)


def test_rows_without_a_key_are_zero() -> None:
    q, k, v = inputs(70, 17)
    o, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not o[:, : 70 - 17].any()
    assert (lse[..., : 70 - 17] == -math.inf).all()


def test_packed_forms() -> None:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(2, 21, 3, 4, 16, generator=generator).requires_grad_()
    q, k, v = qkv.unbind(2)
    wanted = flash_attn_func(q, k, v, causal=True)
    got = flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    (x,) = torch.autograd.grad(got.square().sum(), qkv)
    (y,) = torch.autograd.grad(wanted.square().sum(), qkv)
    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    got = flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, None, True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_dropout_drops_and_rescales() -> None:
    q, k, _ = (x.detach() for x in inputs(48, 64, kv_heads=4, width=64))
    v = torch.eye(64).expand(2, 4, 64, 64).transpose(1, 2)  # o is the matrix of weights
    kept = formula(q, k, v)[0].float()
    torch.manual_seed(5)
    dropped = flash_attn_func(q, k, v, 0.25)
    survived = dropped != 0
    torch.testing.assert_close(dropped[survived], kept[survived] / 0.75, rtol=1e-5, atol=1e-7)
    # 24576 draws: four standard deviations are 0.011.
    assert abs(survived.float().mean().item() - 0.75) < 0.011
    torch.manual_seed(5)
    torch.testing.assert_close(flash_attn_func(q, k, v, 0.25), dropped, rtol=0, atol=0)


def test_deterministic_gradients_repeat() -> None:
    leaves = q, k, v = inputs(33, 70)
    runs = [
        torch.autograd.grad(flash_attn_func(q, k, v, causal=True, deterministic=True).square().sum(), leaves)
        for _ in range(2)
    ]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs(33, 33))
    o = flash_attn_func(q, k, v, causal=True)
    assert o.dtype is dtype
    wanted, _ = formula(q, k, v, causal=True)
    # One rounding of the output, and one of the weights where a kernel rounds them.
    torch.testing.assert_close(o.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whole_graphs(dynamic: bool) -> None:
    slopes = torch.rand(4).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first: Tensor = flash_attn_func(q, k, v, causal=True, window_size=(9, 0), alibi_slopes=slopes)
        second: Tensor = flash_attn_func(first, k, v, softcap=3.0)
        return second

    torch._dynamo.reset()
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for q_len, kv_len in ((33, 33), (21, 50)):
        leaves = [*inputs(q_len, kv_len), slopes]
        got, wanted = compiled(*leaves[:3]), attend(*leaves[:3])
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for x, y in zip(
            torch.autograd.grad(got.square().sum(), leaves),
            torch.autograd.grad(wanted.square().sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dropout_p": 0.1, "return_attn_probs": True}, ValueError, "return_attn_probs: with dropout"),
        ({"softcap": -1.0}, ValueError, "'softcap' is -1.0"),
        ({"softcap": math.nan}, ValueError, "'softcap' is nan"),
        ({"softcap": math.inf}, ValueError, "'softcap' is inf"),
        ({"softcap": "2"}, TypeError, "'softcap' must be a number, not str"),
        ({"softmax_scale": "2"}, TypeError, "'softmax_scale' must be a number, not str"),
        ({"window_size": (1, 2, 3)}, ValueError, "'window_size' is"),
        ({"window_size": 5}, TypeError, "'window_size' is 5; expected two ints"),
        ({"window_size": (None, 1.5)}, TypeError, r"'window_size' is \(None, 1.5\); expected two ints"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, r"'alibi_slopes' has shape \[3\]"),
        ({"alibi_slopes": 0.5}, TypeError, "'alibi_slopes' must be a tensor"),
        ({"s_aux": torch.zeros(2, 4)}, ValueError, r"'s_aux' has shape \[2, 4\]; \[H\] = \[4\] is expected"),
        ({"s_aux": 0.5}, TypeError, r"'s_aux' must be a tensor \[H\], not float"),
        ({"dropout_p": 1.0}, ValueError, "'dropout_p' is 1.0"),
        ({"dropout_p": -0.1}, ValueError, "'dropout_p' is -0.1"),
        ({"dropout_p": math.nan}, ValueError, "'dropout_p' is nan"),
        ({"dropout_p": None}, TypeError, "'dropout_p' must be a number, not NoneType"),
        ({"v": torch.zeros(2, 33, 2, 0)}, ValueError, "the head dimension of v is 0; 1 to 576"),
        (dict.fromkeys(("q", "k"), torch.zeros(2, 33, 2, 0)), ValueError, "the head dimension of q and k is 0"),
        ({"k": torch.zeros(2, 4, 40, 16)}, ValueError, "H must be a multiple of Hkv|expected q"),
        ({"q": torch.zeros(33, 4, 16)}, ValueError, r"'q' has shape \[33, 4, 16\]; \[B, Nq, H, D\]"),
        ({"v": None}, TypeError, "'v' must be a tensor"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = inputs(33, 33)
    with pytest.raises(error, match=words):
        flash_attn_func(**{"q": q, "k": k, "v": v, **change})


def test_what_is_no_packed_tensor_is_refused() -> None:
    q, k, _ = inputs(33, 33)
    with pytest.raises(ValueError, match=r"'kv' has shape \[2, 33, 2, 16\]; \[B, Nk, 2, Hkv, D\] is expected"):
        flash_attn_kvpacked_func(q, k)
    with pytest.raises(ValueError, match=r"\[B, N, 3, H, D\] is expected"):
        flash_attn_qkvpacked_func(torch.zeros(2, 33, 2, 4, 16))
