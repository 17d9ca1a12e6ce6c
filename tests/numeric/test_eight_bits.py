"""Caches of 8 bits: what they mean, what is written to them, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.flash import flash_attn_with_kvcache
from flashgen.runtime.eight_bits import F8
from flashgen.verification.verify import relative_error

from ..runtime.helpers import op as loaded
from .test_decode import CAPACITY, CAUSAL, HKV, LENGTHS, PADDING, POSITIONAL, TOLERANCE, B, captured, paged, random

H = 8


def cache(width: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and their factors [B, Hkv]."""
    factors = random(B, HKV, seed=seed + 10).abs() + 0.1
    numbers = random(B, HKV, CAPACITY, width, seed=seed) / factors[:, :, None, None]
    return numbers.clamp(-448, 448).to(F8), factors


def wide(numbers: Tensor, factors: Tensor) -> Tensor:
    return numbers.double() * factors.double()[:, :, None, None]


@pytest.mark.parametrize("backend", ["cpu", "reference", "tiled"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("text", [CAUSAL, POSITIONAL])
def test_numbers_times_their_factors_are_what_is_attended_to(text: str, queries: int, backend: str) -> None:
    op = loaded(text, backend)
    (k, k_descale), (v, v_descale) = cache(), cache(32 if text == POSITIONAL else 64, seed=2)
    given: dict[str, Any] = {"leftpad": PADDING, **captured(op)}
    for dtype, tolerance in TOLERANCE.items():
        q = random(B, H, queries, 64, dtype=dtype)
        found = op.decode(q, k, v, LENGTHS, k_descale=k_descale, v_descale=v_descale, **given)
        truth = op.reference.decode(q.double(), wide(k, k_descale), wide(v, v_descale), LENGTHS, **given)
        assert found.dtype is dtype
        assert relative_error(found, truth) < tolerance
        own = op.reference.decode(q, k, v, LENGTHS, k_descale=k_descale, v_descale=v_descale, **given)
        assert relative_error(own, truth) < 1e-6


@pytest.mark.parametrize("page", [1, 16, 64])
def test_numbers_lie_in_pages(page: int) -> None:
    op = loaded(CAUSAL, "cpu")
    (k, k_descale), (v, v_descale) = cache(), cache(seed=2)
    factors: dict[str, Any] = {"k_descale": k_descale, "v_descale": v_descale}
    q = random(B, H, 2, 64)
    (k_pages, table), (v_pages, _) = paged(k, page), paged(v, page)
    dense = op.decode(q, k, v, LENGTHS, num_splits=1, **factors)
    assert relative_error(op.decode(q, k_pages, v_pages, LENGTHS, block_table=table, **factors), dense) < 1e-6
    assert relative_error(op.decode(q, k, v, LENGTHS, num_splits=3, **factors), dense) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_divided_by_their_factors_and_rounded(dtype: torch.dtype) -> None:
    op = loaded(CAUSAL, "cpu")
    (k, k_descale), (v, v_descale) = cache(), cache(seed=2)
    q, new = random(B, H, 3, 64, dtype=dtype), random(2, B, HKV, 3, 64, seed=7, dtype=dtype)
    new[0, 1, 0, 0, 0], new[0, 1, 0, 1, 0] = 1e4, -1e4
    before = (k.clone(), v.clone())
    expected = op.reference.decode(q, k, v, LENGTHS, k=new[0], v=new[1], k_descale=k_descale, v_descale=v_descale)
    found = op.decode(q, k, v, LENGTHS, k=new[0], v=new[1], k_descale=k_descale, v_descale=v_descale)
    assert relative_error(found, expected) < TOLERANCE[dtype]
    for x, old, rows, factors in ((k, before[0], new[0], k_descale), (v, before[1], new[1], v_descale)):
        for b, length in enumerate(LENGTHS.tolist()):
            written = (rows[b].float() / factors[b, :, None, None]).clamp(-448, 448).to(F8)
            assert torch.equal(x[b, :, length : length + 3].float(), written.float())
            assert torch.equal(x[b, :, :length].view(torch.uint8), old[b, :, :length].view(torch.uint8))


def test_factors_are_one_unless_given_and_may_be_a_number() -> None:
    op = loaded(CAUSAL, "cpu")
    k, v, q = cache()[0], cache(seed=2)[0], random(B, H, 1, 64)
    plain = op.decode(q, k, v, LENGTHS)
    ones = torch.ones(B, HKV)
    assert torch.equal(plain, op.decode(q, k, v, LENGTHS, k_descale=ones, v_descale=1.0))
    assert relative_error(op.decode(q, k, v, LENGTHS, v_descale=0.25), 0.25 * plain) < 1e-6
    assert torch.equal(
        op.decode(q, k, v, LENGTHS, v_descale=torch.tensor([2.0, 3.0])),
        op.decode(q, k, v, LENGTHS, v_descale=torch.tensor([[2.0, 3.0]]).expand(B, 2)),
    )


def test_every_number_of_8_bits_is_read_as_it_is() -> None:
    op = loaded("attention one { head_dim 64 }", "cpu")
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    bits[[127, 255]] = 0  # the two that are none
    v = bits.view(F8).view(1, 1, 4, 64).transpose(0, 2).contiguous()  # [4, 1, 1, 64]
    k, q = torch.zeros(4, 1, 1, 64).to(F8), torch.zeros(4, 1, 1, 64)
    assert torch.equal(op.decode(q, k, v, 1), v.float())
    none = torch.full((1, 1, 1, 64), torch.nan).to(F8)
    assert op.decode(q[:1], k[:1], none, 1).isnan().all()


def test_flash_attention_takes_factors() -> None:
    (k, k_descale), (v, v_descale) = cache(), cache(seed=2)
    q = random(B, 1, H, 64)
    factors: dict[str, Any] = {"k_descale": k_descale, "v_descale": v_descale}
    found = flash_attn_with_kvcache(
        q, k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=LENGTHS, causal=True, **factors
    )
    op = loaded(CAUSAL, "cpu")
    truth = op.reference.decode(q.transpose(1, 2), k, v, LENGTHS, k_descale=k_descale, v_descale=v_descale)
    assert relative_error(found.transpose(1, 2), truth) < 1e-5


def test_a_spec_says_whether_it_takes_them() -> None:
    k, v, q = cache()[0], cache(seed=2)[0], random(B, H, 1, 64)
    with pytest.raises(TypeError, match="name f8e4m3 in its dtype statement, too"):
        flashgen.loads("attention a { head_dim 64 dtype f32 }", backend="cpu").decode(q, k, v, LENGTHS)
    op = flashgen.loads("attention a { head_dim 64 dtype f32, f8e4m3 }", backend="cpu")
    assert op.decode(q, k, v, LENGTHS).shape == q.shape
    with pytest.raises(TypeError, match=r"built for torch\.float32"):
        op.decode(q.bfloat16(), k, v, LENGTHS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": torch.float32}, TypeError, "both are of 8 bits, or neither"),
        ({"k_descale": "1"}, TypeError, "'k_descale' must be a number or a tensor"),
        ({"k_descale": torch.ones(B, 3)}, ValueError, r"'k_descale' has shape \[3, 3\]; \[B, Hkv\] = \[3, 2\]"),
        ({"v_descale": torch.ones(B, HKV, 1, 1)}, ValueError, "'v_descale' has shape"),
        ({"k_descale": torch.ones(B, HKV, dtype=torch.int32)}, TypeError, "'k_descale' is torch.int32"),
        ({"q": F8}, TypeError, "is built for"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"q": random(B, H, 1, 64), "k": cache()[0], "v": cache(seed=2)[0]}
    for name in ("q", "k", "v"):
        if name in change:
            given[name] = given[name].to(change.pop(name))
    with pytest.raises(error, match=message):
        loaded(CAUSAL, "cpu").decode(given["q"], given["k"], given["v"], LENGTHS, **change)


def test_factors_of_wider_caches_are_refused() -> None:
    q, k = random(B, H, 1, 64), random(B, HKV, CAPACITY, 64)
    with pytest.raises(ValueError, match="'k_descale' goes with a cache of 8 bits"):
        loaded(CAUSAL, "cpu").decode(q, k, k, LENGTHS, k_descale=2.0)
    with pytest.raises(TypeError, match="q, k and v share one type"):
        loaded(CAUSAL, "cpu")(q, k.to(F8), k.to(F8))
