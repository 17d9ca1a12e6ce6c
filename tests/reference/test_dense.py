"""The dense reference against the same formulas written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashgen.reference.dense import Dropout, attention, drop_probability, param_values
from flashgen.reference.philox import drop_threshold, kept_pairs
from tests.reference.helpers import qkv, random, spec

NK = 9


def positions(q_len: int = 9, kv_len: int = NK) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return score.softmax(-1) @ v, score.logsumexp(-1)


def masked(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def test_plain() -> None:
    q, k, v = qkv()
    torch.testing.assert_close(attention(spec(""), q, k, v), by_hand(q, k, v))


def test_causal_with_grouped_queries_is_sdpa() -> None:
    q, k, v = qkv(kv_heads=2)
    o, _ = attention(spec("mask causal"), q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o, expected)


def test_head_dimensions_that_differ_and_cross_attention() -> None:
    q, k, v = qkv(q_len=5, kv_len=13, v=3)
    torch.testing.assert_close(attention(spec("", "8/3"), q, k, v), by_hand(q, k, v))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("window_left(3)", lambda i, j: i - j < 3),
        ("window(2)", lambda i, j: (i - j).abs() <= 2),
        ("prefix(4) or causal", lambda i, j: (j < 4) | (j <= i)),
        ("chunked(4)", lambda i, j: i // 4 == j // 4),
        ("(i - j) % 3 == 0", lambda i, j: (i - j) % 3 == 0),
        ("popcount(i ^ j) <= 1", lambda i, j: (i ^ j == 0) | (i ^ j == 1) | (i ^ j == 2) | (i ^ j == 4) | (i ^ j == 8)),
        ("Nk - 1 - j <= i and B == 2 and H == 4 and Hkv == 4 and D == 8 and Nq == 9", lambda i, j: 8 - j <= i),
    ],
)  # fmt: skip
def test_masks(mask: str, expected: object) -> None:
    q, k, v = qkv()
    assert callable(expected)
    torch.testing.assert_close(
        attention(spec(f"mask {mask}"), q, k, v), by_hand(q, k, v, masked(expected(*positions())))
    )


def test_alibi_with_a_captured_slope() -> None:
    q, k, v = qkv()
    i, j = positions()
    slope = random(4, dtype=torch.float32)
    body = "tensor slope: f32[H] grad\nscore s - slope[h] * (i - j)"
    expected = by_hand(q, k, v, -slope.double()[:, None, None] * (i - j))
    torch.testing.assert_close(attention(spec(body), q, k, v, tensors={"slope": slope}), expected)


def test_tensor_reads_are_clamped_and_i64_narrows() -> None:
    q, k, v = qkv(batch=1, heads=1, kv_heads=1)
    i, j = positions()
    table = random(4, dtype=torch.float32)
    number = torch.tensor([2**32 + 2, -(2**32) - 1])
    body = "tensor table: f32[4]\ntensor number: i64[2]\nscore s + table[i - j] + number[0] + number[1]"
    bias = table.double()[(i - j).clamp(0, 3)] + 2 - 1
    expected = by_hand(q, k, v, bias)
    found = attention(spec(body), q, k, v, tensors={"table": table, "number": number})
    torch.testing.assert_close(found, expected)


def test_softcap_and_scale() -> None:
    q, k, v = qkv()
    score = 5 * torch.tanh(q @ k.transpose(-1, -2) * 0.25 / 5)
    o, lse = attention(spec("scale 1/4\nscore softcap(s, 5.0)"), q, k, v)
    torch.testing.assert_close(o, score.softmax(-1) @ v)
    torch.testing.assert_close(lse, score.logsumexp(-1))


def test_sqdist() -> None:
    q, k, v = qkv()
    score = -torch.cdist(q, k).square() / 2
    torch.testing.assert_close(attention(spec("score -sqdist / 2"), q, k, v)[0], score.softmax(-1) @ v)


def test_sink() -> None:
    q, k, v = qkv()
    sink = random(4, dtype=torch.float32)
    score = q @ k.transpose(-1, -2) / math.sqrt(8) + masked(positions()[1] <= positions()[0])
    logits = torch.cat([score, sink.double().view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1)
    body = "tensor sink: f32[H] grad\nmask causal\nweights softmax(sink = sink[h])"
    o, lse = attention(spec(body), q, k, v, tensors={"sink": sink})
    torch.testing.assert_close(o, logits.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_pointwise_weights_have_no_lse() -> None:
    q, k, v = qkv()
    keep = positions()[1] <= positions()[0]
    s = q @ k.transpose(-1, -2) / math.sqrt(8)
    o, lse = attention(spec("param bias: f32 = -log(Nk)\nscore s + bias\nmask causal\nweights sigmoid(s)"), q, k, v)
    expected = torch.where(keep, torch.sigmoid(s - torch.tensor(9.0).log().double()), 0.0) @ v
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-7)
    assert lse is None


def test_normalize() -> None:
    q, k, v = qkv()
    e = torch.relu(q @ k.transpose(-1, -2) / math.sqrt(8)) ** 2 + 0.01
    o, lse = attention(spec("weights normalize(relu(s) * relu(s) + 0.01)"), q, k, v)
    torch.testing.assert_close(o, e / e.sum(-1, keepdim=True) @ v)
    torch.testing.assert_close(lse, e.sum(-1).log())


def test_layout() -> None:
    q, k, v = qkv()
    i, j = positions()
    torch.testing.assert_close(
        attention(spec("layout block 4: I == J or J == 0"), q, k, v),
        by_hand(q, k, v, masked((i // 4 == j // 4) | (j < 4))),
    )


def test_layout_over_a_tensor() -> None:
    q, k, v = qkv(heads=2, kv_heads=2)
    i, j = positions()
    blocks = torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[0, 1, 0], [1, 1, 1], [1, 0, 0]]], dtype=torch.bool)
    body = "tensor blocks: bool[H, ceildiv(Nq, 4), ceildiv(Nk, 4)]\nlayout block 4: blocks[h, I, J]"
    keep = blocks[:, i // 4, j // 4]
    torch.testing.assert_close(
        attention(spec(body), q, k, v, tensors={"blocks": blocks}), by_hand(q, k, v, masked(keep))
    )


def test_dropout_is_exactly_the_generators_decisions() -> None:
    q, k, v = qkv()
    kept = kept_pairs(77, drop_threshold(0.3), *(torch.arange(n) for n in (2, 4, 9, 9)))
    p = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    o, lse = attention(spec("dropout 0.3"), q, k, v, dropout=Dropout(0.3, 77))
    torch.testing.assert_close(o, torch.where(kept, p / (1 - 9830 / 2**15), 0.0) @ v)
    torch.testing.assert_close(lse, by_hand(q, k, v)[1])


def test_params_and_dropout_probability() -> None:
    example = spec("param c: f32 = 0.25\nparam n: i32 = Nk // 2\nparam d: f32 = c * 2 + n\ndropout c\nscore s * d + n")
    values = param_values(example, {"c": 0.125}, {"Nk": 9})
    assert values == {"c": 0.125, "n": 4, "d": 4.25}
    assert drop_probability(example, values, {"Nk": 9}) == 0.125
    q, k, v = qkv()
    s = q @ k.transpose(-1, -2) / math.sqrt(8) * 4.25
    torch.testing.assert_close(attention(example, q, k, v, params={"c": 0.125})[0], s.softmax(-1) @ v)
    with pytest.raises(KeyError, match="ell"):
        attention(spec("param ell: f32\nscore s * ell"), q, k, v)


def test_rows_with_nothing_kept_give_zero() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    o, lse = attention(spec("mask i >= 2 and j < i"), *leaves)
    assert lse is not None
    assert torch.equal(o[:, :, :2], torch.zeros(2, 4, 2, 8, dtype=torch.float64))
    assert (lse[:, :, :2] == -torch.inf).all()
    found = torch.autograd.grad([o[:, :, :2].sum(), lse[:, :, :2].sum()], leaves)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found)


@pytest.mark.parametrize("keys", [9, 0])
def test_of_a_row_with_nothing_kept_the_sink_is_the_denominator(keys: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    k, v = k[:, :, :keys], v[:, :, :keys]
    sink = random(4, dtype=torch.float32).requires_grad_()
    body = "tensor sink: f32[H] grad\nmask i >= 2 and j < i\nweights softmax(sink = sink[h])"
    o, lse = attention(spec(body), q, k, v, tensors={"sink": sink})
    assert lse is not None
    assert not o[:, :, :2].any()
    torch.testing.assert_close(lse[:, :, :2], sink.double().view(1, 4, 1).expand(2, 4, 2))
    *others, by_sink = torch.autograd.grad([o[:, :, :2].sum(), lse[:, :, :2].sum()], [q, k, v, sink])
    assert not any(gradient.any() for gradient in others)
    torch.testing.assert_close(by_sink, torch.full((4,), 4.0))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = qkv()
    body = "tensor sink: f32[H]\nmask i >= 2 and j < i\nweights softmax(sink = sink[h])"
    found = attention(spec(body), q, k, v, tensors={"sink": torch.full((4,), -torch.inf)})
    torch.testing.assert_close(found, attention(spec("mask i >= 2 and j < i"), q, k, v))


def test_a_score_of_minus_infinity_counts_as_masked() -> None:
    q, k, v = qkv()
    by_score = attention(spec("score s if j <= i and j > 0 else -inf"), q, k, v)
    by_mask = attention(spec("mask j <= i and j > 0"), q, k, v)
    torch.testing.assert_close(by_score, by_mask, rtol=0, atol=0)
    pointwise = attention(spec("score where(j <= i, s, -inf)\nweights exp(-s)"), q, k, v)[0]
    torch.testing.assert_close(pointwise, attention(spec("mask causal\nweights exp(-s)"), q, k, v)[0])
    assert pointwise.isfinite().all()


@pytest.mark.parametrize("weights", ["softmax", "normalize(exp(s) + log(s - s + 1))", "exp(s)"])
def test_what_a_mask_hides_does_not_reach_a_gradient(weights: str) -> None:
    """log(i - j) is -inf on the diagonal and NaN above it, and so are its derivatives."""
    q, k, v = (x.requires_grad_() for x in qkv())
    slope = random(4, dtype=torch.float32).requires_grad_()
    body = f"tensor slope: f32[H] grad\nscore s - slope[h] * log(i - j) / sqrt(i - j)\nmask j < i\nweights {weights}"
    o, _ = attention(spec(body), q, k, v, tensors={"slope": slope})
    assert o.isfinite().all()
    for gradient in torch.autograd.grad(o.square().sum(), [q, k, v, slope]):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_a_zero_row_of_normalize_gives_zero() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    o, lse = attention(spec("weights normalize(relu(s) if i > 0 else 0.0 * s)"), q, k, v)
    assert lse is not None
    assert not o[:, :, 0].any()
    assert (lse[:, :, 0] == -torch.inf).all()
    assert not torch.autograd.grad(o[:, :, 0].sum(), q)[0].any()


def test_nan_and_infinity_pass_through() -> None:
    q, k, v = qkv(batch=1, heads=1, kv_heads=1)
    q[0, 0, 3, 2] = torch.nan
    v[0, 0, 8, 0] = torch.inf
    o, lse = attention(spec(""), q, k, v)
    assert lse is not None
    assert o[0, 0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    assert (o[0, 0, others, 0] == torch.inf).all()
    assert o[0, 0, others, 1:].isfinite().all()
    dropped, _ = attention(spec("dropout 0.5"), q, k, v, dropout=Dropout(1 - 2**-15, 1))
    assert dropped[0, 0, 3].isnan().all()


@pytest.mark.parametrize("sizes", [(0, 4, 4, 9, 9), (2, 0, 0, 9, 9), (2, 4, 4, 0, 9), (2, 4, 2, 9, 0)])
@pytest.mark.parametrize("weights", ["softmax", "normalize(exp(s))", "exp(s)"])
def test_empty(sizes: tuple[int, int, int, int, int], weights: str) -> None:
    batch, heads, kv_heads, q_len, kv_len = sizes
    q, k, v = qkv(batch, heads, kv_heads, q_len, kv_len)
    body = f"tensor doc: i32[B, Nk]\nmask doc[b, i] == doc[b, j]\nweights {weights}"
    o, lse = attention(spec(body), q, k, v, tensors={"doc": torch.zeros(batch, kv_len, dtype=torch.int32)})
    assert o.shape == (batch, heads, q_len, 8)
    assert not o.any()
    assert lse is None or (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_composed_in_low_precision(dtype: torch.dtype) -> None:
    """Positions and slopes stay exact; the score is rounded to the type as PyTorch would round it."""
    q, k, v = (x.to(dtype) for x in qkv(q_len=300, kv_len=300))
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    body = "tensor slope: f32[H]\nscore softcap(s - slope[h] * (i - j), 30.0) + int(s) * 0.0\nmask causal"
    o, lse = attention(spec(body), q, k, v, tensors={"slope": slope})
    truth, _ = attention(spec(body), q, k, v, tensors={"slope": slope}, dtype=torch.float64)
    assert o.dtype is dtype
    assert lse is not None
    assert lse.dtype is dtype
    error = (o.double() - truth).norm() / truth.norm()
    assert error < 20 * torch.finfo(dtype).eps
