"""Arguments that FlashAttention's versions 3 and 4 added, and what is refused by all functions alike.

Against the formula in float64, by which pairs a row keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen import flash
from flashgen.flash import flash_attn_combine
from flashgen.flash.options import CallSizes, plan_call

from .test_dense import TOLERANCE

pytestmark = pytest.mark.usefixtures("on_reference")
Kept = Callable[[Tensor, Tensor], Tensor]
# Their arguments are what is tested.
flash_attn_func: Any = flash.flash_attn_func
flash_attn_qkvpacked_func: Any = flash.flash_attn_qkvpacked_func


def exact(
    rows: Sequence[Tensor], kept: Kept, qv: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse of q, k and v [B, N, H, D]; ``kept`` says of positions of queries and keys which pairs are kept."""
    q, k, v = (x.double() for x in rows)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    width = q.shape[3]
    if qv is not None:
        s, width = s + torch.einsum("bihd,bjhd->bhij", qv.double(), v), width + v.shape[3]
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    is_kept = kept(at, torch.arange(k.shape[1])[None]).expand(s.shape[2:])
    s = (s * (scale or 1 / math.sqrt(width))).masked_fill(~is_kept, -math.inf)
    lse = s.logsumexp(-1)
    weights = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def leaves(q_len: int = 9, kv_len: int = 14, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len * 100 + kv_len)
    shapes = [(2, q_len, 4, width), (2, kv_len, 2, width), (2, kv_len, 2, 8)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_exact(rows: list[Tensor], kept: Kept, options: dict[str, Any]) -> None:
    """o, lse and every gradient."""
    qv = options.get("qv")
    o, lse = flash_attn_func(*rows, return_lse=True, **options)
    wanted, sums = exact(rows, kept, qv)
    torch.testing.assert_close(o.double(), wanted, **TOLERANCE)
    torch.testing.assert_close(lse.double(), sums, **TOLERANCE)
    seen, d_o = sums.detach() > -math.inf, torch.linspace(-1, 1, o.numel()).view_as(o)
    own = [*rows, *([] if qv is None else [qv])]
    found = torch.autograd.grad((o * d_o).sum() + lse[seen].sum(), own)
    for x, y in zip(found, torch.autograd.grad((wanted * d_o).sum() + sums[seen].sum(), own), strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


WINDOWS: dict[str, tuple[Any, Kept]] = {
    "a list": ([3, 4], lambda i, j: (j >= i - 3) & (j <= i + 4)),
    "a tensor": (torch.tensor([3, 4]), lambda i, j: (j >= i - 3) & (j <= i + 4)),
    "of NumPy": ((np.int64(3), np.int32(4)), lambda i, j: (j >= i - 3) & (j <= i + 4)),
    "None to the left": ((None, 3), lambda i, j: j <= i + 3),
    "None to the right": ((3, None), lambda i, j: j >= i - 3),
    "None": ((None, None), lambda i, j: j >= 0),
    "ahead": ((-3, 8), lambda i, j: (j >= i + 3) & (j <= i + 8)),
    "ahead without an end": ((-3, None), lambda i, j: j >= i + 3),
    "ahead by one, of version 4": ((-1, None), lambda i, j: j >= i + 1),
    "behind": ((8, -3), lambda i, j: (j >= i - 8) & (j <= i - 3)),
    "behind by one, of version 4": ((None, -1), lambda i, j: j <= i - 1),
    "no limit of versions 2 and 3": ((-1, 2), lambda i, j: j <= i + 2),
    "none at all": ((-5, -1), lambda i, j: j >= 0),
    "further than all keys": ((-(2**40), None), lambda i, j: j < 0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    window, kept = WINDOWS[name]
    assert_exact(leaves(), kept, {"window_size": window})
    assert_exact(leaves(14, 9), kept, {"window_size": window})
    if name not in ("ahead", "behind"):
        return
    with pytest.raises(ValueError, match=r"'window_size' is \(-8, 3\): keys from 8 to 3 after a query are none"):
        flash_attn_func(*leaves(), window_size=(-8, 3))
    with pytest.raises(ValueError, match=r"'window_size' is \(-3, 8\) beside causal: keys from 3 to 0"):
        flash_attn_func(*leaves(), window_size=(-3, 8), causal=True)


@pytest.mark.parametrize("lengths", [(9, 14), (14, 9), (1, 14)])
@pytest.mark.parametrize("chunk", [1, 4, 2**40])
def test_chunks(chunk: int, lengths: tuple[int, int]) -> None:
    def same(i: Tensor, j: Tensor) -> Tensor:
        return i.div(chunk, rounding_mode="floor") == j.div(chunk, rounding_mode="floor")

    assert_exact(leaves(*lengths), same, {"attention_chunk": chunk})
    assert_exact(leaves(*lengths), lambda i, j: same(i, j) & (j <= i), {"attention_chunk": chunk, "causal": True})
    window = {"attention_chunk": chunk, "window_size": (2, 1)}
    assert_exact(leaves(*lengths), lambda i, j: same(i, j) & (j >= i - 2) & (j <= i + 1), window)


def test_a_second_query_that_meets_values() -> None:
    rows = leaves(width=6)
    qv = torch.randn(2, 9, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_exact(rows, lambda i, j: j <= i, {"causal": True, "qv": qv})
    o = flash_attn_func(*rows, qv=qv, softmax_scale=0.3)
    wanted, _ = exact(rows, lambda i, j: j >= 0, qv, 0.3)
    torch.testing.assert_close(o.double(), wanted, **TOLERANCE)
    for wrong, kind in ((qv[..., :4], ValueError), (qv.half(), ValueError), (2.0, TypeError)):
        with pytest.raises(kind, match="'qv'"):
            flash_attn_func(*rows, qv=wrong)


def test_names_of_one_argument() -> None:
    rows, sinks = leaves(), torch.randn(4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    whole = flash_attn_func(*rows, s_aux=sinks, return_attn_probs=True)
    assert len(whole) == 3
    for name in ("return_lse", "return_softmax_lse"):
        pair = flash_attn_func(*rows, learnable_sink=sinks, num_splits=3, pack_gqa=True, sm_margin=4, **{name: True})
        assert len(pair) == 2
        assert torch.equal(pair[0], whole[0])
        assert torch.equal(pair[1], whole[1])
    with pytest.raises(TypeError, match="'s_aux' and 'learnable_sink' are two names of one argument"):
        flash_attn_func(*rows, s_aux=sinks, learnable_sink=sinks)
    with pytest.raises(TypeError, match=r"'learnable_sink' must be a tensor \[H\]"):
        flash_attn_func(*rows, learnable_sink=0.5)
    o, lse = flash_attn_func(*rows, dropout_p=0.5, return_lse=True)
    torch.testing.assert_close(lse.double(), exact(rows, lambda i, j: j >= 0)[1], **TOLERANCE)
    assert o.shape == whole[0].shape


# Every function with arguments that it takes.
CU, CACHE = torch.tensor([0, 4, 9], dtype=torch.int32), torch.zeros(2, 14, 2, 8)
ROWS = {"q": torch.zeros(9, 2, 8), "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8)}
STARTS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
CALLS: dict[str, dict[str, Any]] = {
    "flash_attn_func": {name: x[None] for name, x in ROWS.items()},
    "flash_attn_qkvpacked_func": {"qkv": torch.zeros(1, 9, 3, 2, 8)},
    "flash_attn_kvpacked_func": {"q": ROWS["q"][None], "kv": torch.zeros(1, 9, 2, 2, 8)},
    "flash_attn_varlen_func": {**ROWS, **STARTS},
    "flash_attn_varlen_qkvpacked_func": {"qkv": torch.zeros(9, 3, 2, 8), "cu_seqlens": CU},
    "flash_attn_varlen_kvpacked_func": {"q": ROWS["q"], "kv": torch.zeros(9, 2, 2, 8), **STARTS},
    "flash_attn_with_kvcache": {"q": torch.zeros(2, 1, 2, 8), "k_cache": CACHE, "v_cache": CACHE},
}
WRONG: dict[str, tuple[Any, str]] = {
    "causal": ("no", "'causal' is 'no'; it must be True or False"),
    "deterministic": (1, "'deterministic' is 1; it must be True or False"),
    "return_attn_probs": ("no", "'return_attn_probs' is 'no'"),
    "return_softmax_lse": (None, "'return_softmax_lse' is None; it must be True or False"),
    "return_lse": (0, "'return_lse' is 0"),
    "rotary_interleaved": (2, "'rotary_interleaved' is 2"),
    "pack_gqa": ("auto", "'pack_gqa' is 'auto'; it must be None, True or False"),
    "num_splits": (-1, "'num_splits' is -1"),
    "sm_margin": (0.5, "'sm_margin' must be an int, not float"),
    "attention_chunk": ("4", "'attention_chunk' must be an int, not str"),
    "softcap": ([1.0], "'softcap' must be a number, not list"),
    "softmax_scale": (True, "'softmax_scale' must be a number, not bool"),
    "window_size": (("1", 2), r"'window_size' is \('1', 2\); expected two ints"),
    "learnable_sinks": (None, r"unexpected keyword argument 'learnable_sinks'; did you mean 'learnable_sink'\?"),
    "rotary_seqlen": (3, "unexpected keyword argument 'rotary_seqlen'"),
}
OF_TRAINING, OF_CACHES = {"deterministic", "return_attn_probs"}, {"rotary_interleaved"}


@pytest.mark.parametrize("function", CALLS)
def test_what_is_refused_by_name(function: str) -> None:
    call, is_cache = getattr(flash, function), function == "flash_attn_with_kvcache"
    call(**CALLS[function])
    call(**CALLS[function], causal=False, softcap=0)  # which are equal to what is refused, and remembered
    for name, (value, said) in WRONG.items():
        if name not in (OF_TRAINING if is_cache else OF_CACHES):
            with pytest.raises((TypeError, ValueError), match=said):
                call(**CALLS[function], **{name: value})
    for value in (0, 1.0, None, torch.tensor(True), [True]):
        with pytest.raises(TypeError, match="'causal' is"):
            call(**CALLS[function], causal=value)


def test_numbers_in_tensors_are_read_at_each_call() -> None:
    rows, scale = leaves(), torch.tensor(0.3)
    for value in (0.3, 0.7):
        scale.fill_(value)
        torch.testing.assert_close(
            flash_attn_func(*rows, softmax_scale=scale),
            flash_attn_func(*rows, softmax_scale=value),
        )


def test_packed_forms_hand_options_on() -> None:
    qkv = torch.randn(2, 9, 3, 2, 8, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"attention_chunk": 4, "s_aux": torch.zeros(2), "return_lse": True}
    for x, y in zip(flash_attn_qkvpacked_func(qkv, **options), flash_attn_func(*qkv.unbind(2), **options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_parts_are_combined(is_ragged: bool) -> None:
    q, k, v = leaves()
    pieces = [(0, 5), (5, 14), (14, 14)]
    parts = [flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in pieces]
    o, lse = torch.stack([each[0] for each in parts]), torch.stack([each[1].transpose(1, 2) for each in parts])
    wanted, sums = exact((q, k, v), lambda i, j: j >= 0)
    if is_ragged:
        o, lse, wanted, sums = o[:, 0], lse[:, 0], wanted[0], sums[0].t()
    else:
        sums = sums.transpose(1, 2)
    found, found_sums = flash_attn_combine(o, lse)
    torch.testing.assert_close(found.double(), wanted, **TOLERANCE)
    torch.testing.assert_close(found_sums.double(), sums, **TOLERANCE)
    d_o = torch.linspace(-1, 1, found.numel()).view_as(found)
    own = torch.autograd.grad((found * d_o).sum() + found_sums.sum(), (q, k, v))
    for x, y in zip(own, torch.autograd.grad((wanted * d_o).sum() + sums.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


def test_rows_of_which_no_part_has_a_key() -> None:
    """Whatever lies in parts without a key."""
    o = torch.tensor([[2.0, 4.0], [math.nan, math.nan]]).view(2, 1, 1, 1, 2).repeat(1, 1, 2, 1, 1).requires_grad_()
    lse = torch.tensor([[3.0, -math.inf], [-math.inf, -math.inf]]).view(2, 1, 2, 1).requires_grad_()
    out = torch.empty(1, 2, 1, 2, dtype=torch.bfloat16)
    found, sums = flash_attn_combine(o.detach(), lse.detach(), out)
    assert found is out
    assert torch.equal(out.flatten(), torch.tensor([2.0, 4.0, 0.0, 0.0]).bfloat16())
    assert torch.equal(sums.flatten(), torch.tensor([3.0, -math.inf]))
    found, sums = flash_attn_combine(o, lse, out_dtype=torch.float16)
    assert found.dtype is torch.float16
    gradients = torch.autograd.grad(found.sum() + sums[:, 0].sum(), (o, lse))
    assert all(x.isfinite().all() for x in gradients)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lse_partial": lse[..., 0]}, r"'lse_partial' has shape \[2, 1, 2\]; \[splits, B, Nq, H\] is expected"),
        ({"lse_partial": lse[:1]}, r"'lse_partial' has shape \[1, 1, 2, 1\]; \[2, 1, 2, 1\] is expected"),
        ({"out_partial": o.double()}, "'out_partial' is torch.float64; torch.float32 is expected"),
        ({"out_dtype": torch.int32}, "'out_dtype' is torch.int32"),
        ({"out": out[:, :1]}, r"and 'out' torch.bfloat16 \[1, 1, 1, 2\]"),
    )
    for wrong, said in cases:
        with pytest.raises((ValueError, TypeError), match=said):
            flash_attn_combine(**({"out_partial": o, "lse_partial": lse} | wrong))


@pytest.mark.parametrize("scale", [None, 0.25, 16**-0.5])
def test_the_usual_scale_is_a_constant_of_the_kernel(scale: float | None) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    sizes = CallSizes(batch=1, heads=2, width=16, v_width=16)
    asked = plan_call(sizes, (0.0, scale, True, (-1, -1), 0.0, None, False, False), {})
    assert not asked.captured
    assert not asked.op.spec.params
    wanted, _ = exact((q, k, v), lambda i, j: j <= i)
    found = flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    torch.testing.assert_close(found.double(), wanted, **TOLERANCE)


def test_another_scale_is_a_number_of_the_call() -> None:
    sizes = CallSizes(batch=1, heads=2, width=16, v_width=16)
    asked = plan_call(sizes, (0.0, 0.3, True, (-1, -1), 0.0, None, False, False), {})
    assert asked.captured == {"scaling": 0.3}
