"""Caches of 8 bits: what they mean, what is written to them, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.compiler.compiled import compiled
from flashgen.flash import flash_attn_with_kvcache
from flashgen.hosts.emulated import recording
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.op.signature import F8
from flashgen.targets.registry import GPUS
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import relative_error

from ..op.helpers import op as loaded
from . import test_decode_on_gpus as on_gpus
from .test_decode import CAPACITY, CAUSAL, HKV, LENGTHS, PADDING, POSITIONAL, TOLERANCE, B, captured, paged, random

H = 8
NARROW = "attention cache_narrow { head_dim 40/20  mask causal }"  # of no whole groups of 16 numbers


def cache(width: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and their factors [B, Hkv]."""
    return cache_of(CAPACITY, width, seed)


def cache_of(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    factors = random(B, HKV, seed=seed + 10).abs() + 0.1
    numbers = random(B, HKV, rows, width, seed=seed) / factors[:, :, None, None]
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_every_number_of_8_bits_is_read_as_it_is(backend: str, dtype: torch.dtype) -> None:
    op = loaded("attention one { head_dim 64 }", backend)
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    bits[[127, 255]] = 0  # the two that are none
    v = bits.view(F8).view(1, 1, 4, 64).transpose(0, 2).contiguous()  # [4, 1, 1, 64]
    k, q = torch.zeros(4, 1, 1, 64).to(F8), torch.zeros(4, 1, 1, 64, dtype=dtype)
    assert torch.equal(op.decode(q, k, v, 1), v.to(dtype))
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


# -- on GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "dtype", "target"),
    [
        ("rich", torch.float32, "sm_80"),
        ("rich", torch.bfloat16, "sm_90a"),
        *((form, torch.float16, "sm_80") for form in ("gaussian", "squares", "narrow")),
        *(
            pytest.param(form, dtype, target, marks=pytest.mark.slow)
            for form in (*on_gpus.FORMS, "narrow")
            for dtype in TOLERANCE
            for target in ("sm_75", "sm_80", "sm_90a")
        ),
    ],
)
def test_kernels_for_gpus_read_bytes(form: str, dtype: torch.dtype, target: str) -> None:
    """In entries and pages, whole and in parts, rows of whole groups of 16 bytes and others."""
    op = on_gpus.emulated({**on_gpus.FORMS, "narrow": NARROW}[form], target)
    width = op.spec.head_dims[-1]
    q = random(on_gpus.B, 6, 3, width.qk, dtype=dtype)
    (k, k_descale), (v, v_descale) = (
        cache_of(on_gpus.CAPACITY, each, seed=n) for n, each in ((1, width.qk), (2, width.v))
    )
    given = {"leftpad": PADDING, "k_descale": k_descale, "v_descale": v_descale, **on_gpus.captured(op, 6)}
    with recording() as counted:
        for splits in (1, 3):
            on_gpus.check(op, q, k, v, on_gpus.LENGTHS, num_splits=splits, **given)
        for page in (4, 64):
            (k_pages, table), (v_pages, _) = (on_gpus.in_pages(x.float(), page) for x in (k, v))
            pages = (k_pages.to(F8), v_pages.to(F8))  # NaN where nobody has rows
            on_gpus.check(op, q, *pages, on_gpus.LENGTHS, block_table=table, **given)
    assert all("_f8_cached_" in each.launches.launches[0].kernel for each in counted)


@pytest.mark.parametrize("splits", [1, 3])
def test_bytes_are_those_of_numbers_of_8_bits(splits: int) -> None:
    op = on_gpus.emulated(CAUSAL)
    q = random(on_gpus.B, 6, 3, 64, dtype=torch.bfloat16)
    (k, k_descale), (v, v_descale) = (cache_of(on_gpus.CAPACITY, 64, seed=n) for n in (1, 2))
    with recording() as counted:
        op.decode(q, k, v, on_gpus.LENGTHS, num_splits=splits, k_descale=k_descale, v_descale=v_descale)
    inputs = Inputs(q=q, k=k, v=v, captured={}, params={}, d_o=q, d_lse=q[..., 0])
    moved = hbm_bytes(op, inputs, counted)["forward"]
    assert moved.predicted == moved.counted
    traffic = counted[0].report.traffic
    assert traffic["k"].total == traffic["v"].total == on_gpus.HKV * int(on_gpus.LENGTHS.sum()) * 64
    assert "_f8_cached_" in op.explain_decode(q, k, v, num_splits=splits).forward.kernels[0].name
    shown = [op.explain_decode(q, *cache, num_splits=1) for cache in ((k.bfloat16(), v.bfloat16()), (k, v))]
    rows = on_gpus.B * on_gpus.HKV * on_gpus.CAPACITY
    moved_by = [each.forward.hbm_bytes for each in shown]
    assert moved_by[0] is not None
    assert moved_by[1] is not None
    assert moved_by[0] - moved_by[1] == rows * (64 + 64)


def test_rows_that_lie_at_no_multiple_of_16_bytes_are_copied() -> None:
    op = on_gpus.emulated(CAUSAL)
    q = random(on_gpus.B, 6, 3, 64, dtype=torch.bfloat16)
    k, v = (cache_of(on_gpus.CAPACITY, 65, seed=n)[0][..., 1:] for n in (1, 2))
    wanted = op.decode(q, k.contiguous(), v.contiguous(), on_gpus.LENGTHS)
    assert torch.equal(op.decode(q, k, v, on_gpus.LENGTHS), wanted)


def test_kernels_of_wider_caches_have_nothing_of_8_bits() -> None:
    spec = flashgen.loads("attention a { head_dim 64 dtype bf16, f8e4m3 }", backend="reference").spec
    narrow, wide = (
        compiled(kernel_variant(spec, HeadDim(64, 64), rows), GPUS["sm_80"]).source.text for rows in (F8_CACHED, CACHED)
    )
    for word in ("f8_cached = true", "NarrowTile", "EightBitsOfCaches"):
        assert word in narrow
        assert word not in wide


@pytest.mark.parametrize("power", [-110, -40, 0, 60, 110])
def test_queries_of_any_size_beside_8_bits(power: int) -> None:
    """In kernels they are float16, each row times a power of two."""
    op = on_gpus.emulated("attention sized { head_dim 64  dtype bf16, f8e4m3 }")
    (k, factor), (v, _) = cache_of(70, 64, seed=1), cache_of(70, 64, seed=2)
    k, v, factor = k[:1], v[:1], factor[:1] * 2.0**-power
    q = random(1, H, 2, 64, dtype=torch.bfloat16) * 2.0**power
    q[0, 1] *= 2.0 ** torch.arange(0, -16, -0.25)  # and within a row
    q[0, 2] = 0.0
    found = op.decode(q, k, v, 70, k_descale=factor)
    truth = op.reference.decode(q.double(), wide(k, factor), v.double(), 70)
    for h in range(H):
        assert relative_error(found[:, h], truth[:, h]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_in_a_query_stays_in_its_row(bad: float) -> None:
    op = on_gpus.emulated("attention bad { head_dim 64  dtype bf16, f8e4m3 }")
    (k, _), (v, _) = cache_of(70, 64, seed=1), cache_of(70, 64, seed=2)
    q = random(1, H, 2, 64, dtype=torch.bfloat16)
    clean = op.decode(q, k[:1], v[:1], 70)
    q[0, 1, 0, 5] = bad
    found = op.decode(q, k[:1], v[:1], 70)
    truth = op.reference.decode(q.double(), k[:1].double(), v[:1].double(), 70)
    assert found[0, 1, 0].isnan().all()
    assert truth[0, 1, 0].isnan().all()
    found[0, 1, 0] = clean[0, 1, 0]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_float16_does_not_hold_beside_8_bits(dtype: torch.dtype) -> None:
    """Of no softmax: a row's are multiplied by a power of two, in parts of the keys by one each."""
    op = on_gpus.emulated("attention large { head_dim 64  dtype bf16, f16, f8e4m3  weights (s * s) * (s * s) * 10 }")
    (k, factor), (v, _) = cache_of(300, 64, seed=1), cache_of(300, 64, seed=2)
    k, factor = k[:1], factor[:1]
    k[:, :, :150] = (k[:, :, :150].float() * 0.1).to(F8)  # small ones first, so that the scale changes
    q = random(1, H, 2, 64, dtype=dtype) * 40
    truth = op.reference.decode(q.double(), wide(k, factor), v[:1].double() * 2.0**-22, 300)
    for splits in (1, 3):
        found = op.decode(q, k, v[:1], 300, k_descale=factor, v_descale=2.0**-22, num_splits=splits)
        assert relative_error(found, truth) < TOLERANCE[dtype]
