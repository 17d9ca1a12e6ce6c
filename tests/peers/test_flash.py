"""What FlashAttention's tests ask, asked of flashgen.flash: options × types × head dimensions × lengths, dense, ragged
and over caches, by its own rule: no further from the truth than twice what PyTorch's operators are in the same type.
"""

from __future__ import annotations

import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashgen.op import layer
from tests.slices import one_of

BF16, F16 = torch.bfloat16, torch.float16
OPTIONS = [
    {
        **({"causal": True} if causal else {}),
        **({"window_size": window} if window else {}),
        **({"softcap": 15.0} if capped else {}),
        **({"alibi": True} if sloped else {}),
    }
    for causal, window, capped, sloped in itertools.product((False, True), (None, (7, 3)), (False, True), (False, True))
]
LENGTHS = [(1, 1), (1, 33), (13, 40), (40, 13), (64, 64), (97, 130), (113, 203), (128, 65), (2, 257)]
WIDTHS = [32, 40, 64, 59, 96, 128, 111, 16]
HEADS = [(4, 4), (6, 2), (4, 1)]
# Every option with every type, and others in turn, so that each meets each soon.
CASES = [
    (options, dtype, LENGTHS[n % len(LENGTHS)], WIDTHS[n % len(WIDTHS)], HEADS[n % len(HEADS)])
    for n, (dtype, options) in enumerate(itertools.product((BF16, F16), OPTIONS))
]


def attention(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    """The formula in PyTorch's operators, [B, N, H, D], every step of it in a type."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    cap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    scores = cap * torch.tanh(scores / cap) if cap else scores
    at = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - (slopes.double()[..., None, None] * at.abs()).to(dtype)
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    kept = (at <= (left if left >= 0 else math.inf)) & (at >= (-right if right >= 0 else -math.inf))
    weights = torch.where(kept, scores, -math.inf).softmax(-1)
    o: Tensor = torch.where(kept.any(-1)[:, None], weights.nan_to_num(), 0) @ v
    return o.transpose(1, 2)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def of_heads(options: dict[str, Any], batch: int, heads: int) -> dict[str, Any]:
    """With slopes for each head of each sequence, where they are asked for."""
    given = {name: value for name, value in options.items() if name != "alibi"}
    if options.get("alibi"):
        given["alibi_slopes"] = torch.rand(batch, heads, generator=torch.Generator().manual_seed(7)) * 0.3
    return given


def assert_near(own: list[Tensor], exact: list[Tensor], torchs: list[Tensor]) -> None:
    for x, y, z in zip(own, exact, torchs, strict=True):
        # Where the truth is 0 and the other's roundings cancel, sums of float32 of size 10 leave some of theirs.
        allowed = 2 * float((z.double() - y).abs().max()) + torch.finfo(x.dtype).eps * float(y.abs().max()) + 1e-6
        assert float((x.double() - y).abs().max()) <= allowed


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of layers on the reference, which takes no compiler."""
    monkeypatch.setattr(layer, "_NAMES", {})
    monkeypatch.setattr(layer, "_OPS", SimpleNamespace())
    monkeypatch.setattr(layer, "loads", functools.partial(vars(layer)["loads"], backend="reference"))


def check_dense(
    options: dict[str, Any], dtype: torch.dtype, lengths: tuple[int, int], width: int, heads: tuple[int, int]
) -> None:
    """o and the gradients of q, k and v."""
    (q_len, kv_len), (h, hkv) = lengths, heads
    leaves = [drawn((2, n, each, width), dtype, n + each) for n, each in ((q_len, h), (kv_len, hkv), (kv_len + 1, hkv))]
    q, k, v = leaves[0], leaves[1], leaves[2][:, :kv_len].detach().requires_grad_()
    given = of_heads(options, 2, h)
    d_o = drawn((2, q_len, h, width), dtype, 3).detach()

    def results(o: Tensor) -> list[Tensor]:
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.to(o.dtype))]

    own = results(flash_attn_func(q, k, v, **given))
    assert_near(own, *(results(attention(q, k, v, each, given)) for each in (torch.float64, dtype)))


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("case", one_of(3, [(each,) for each in CASES]))
def test_dense(case: tuple[Any, ...]) -> None:
    check_dense(*case)


@pytest.mark.parametrize("case", one_of(16, [(each,) for each in CASES]))
def test_dense_on_kernels(case: tuple[Any, ...]) -> None:
    check_dense(*case)


SEQUENCES = ((7, 9), (0, 3), (1, 1), (40, 25), (5, 0), (33, 33))


def check_ragged(options: dict[str, Any], dtype: torch.dtype, width: int, heads: tuple[int, int]) -> None:
    """Each sequence as a dense call; some have no queries, others no keys."""
    h, hkv = heads
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*SEQUENCES, strict=True)]
    totals = [int(each[-1]) for each in starts]
    q, k, v = (drawn((totals[n > 0], (h, hkv, hkv)[n], width), dtype, n) for n in range(3))
    given = of_heads(options, len(SEQUENCES), h)
    d_o = drawn((totals[0], h, width), dtype, 3).detach()

    def of_sequences(dtype: torch.dtype) -> Tensor:
        rows = []
        for b in range(len(SEQUENCES)):
            own = {name: x[b : b + 1] if name == "alibi_slopes" else x for name, x in given.items()}
            i, j = (slice(int(each[b]), int(each[b + 1])) for each in starts)
            rows.append(attention(q[None, i], k[None, j], v[None, j], dtype, own)[0])
        return torch.cat(rows)

    def results(o: Tensor) -> list[Tensor]:
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.to(o.dtype))]

    longest = [max(each) for each in zip(*SEQUENCES, strict=True)]
    own = results(flash_attn_varlen_func(q, k, v, starts[0], starts[1], longest[0], longest[1], **given))
    assert_near(own, *(results(of_sequences(each)) for each in (torch.float64, dtype)))


RAGGED = [(options, dtype, width, heads) for options, dtype, _, width, heads in CASES]


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("case", one_of(4, [(each,) for each in RAGGED]))
def test_ragged(case: tuple[Any, ...]) -> None:
    check_ragged(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", RAGGED[::5])
def test_ragged_on_kernels(case: tuple[Any, ...]) -> None:
    check_ragged(*case)


CACHES = [
    (options, dtype, queries, new, page, heads)
    for n, (options, dtype) in enumerate(itertools.product(OPTIONS, (BF16, F16)))
    for queries, new, page, heads in [((1, 1, 3, 64)[n % 4], (0, 1, 3, 64)[n % 4], (0, 0, 16)[n % 3], HEADS[n % 3])]
]


def check_cache(
    options: dict[str, Any], dtype: torch.dtype, queries: int, new: int, page: int, heads: tuple[int, int]
) -> None:
    """What a call gives, and what it writes, of sequences of other lengths, in entries or in pages of any order."""
    (h, hkv), room, width = heads, 192, 32
    filled = torch.tensor([0 if new else 1, 64, 100], dtype=torch.int32)
    batch = len(filled)
    q, k, v = (drawn((batch, n, each, width), dtype, n).detach() for n, each in ((queries, h), (new, hkv), (new, hkv)))
    k_cache, v_cache = (drawn((batch, room, hkv, width), dtype, seed).detach() for seed in (5, 6))
    given, named = of_heads(options, batch, h), dict[str, Any]()
    exact = [x.clone() for x in (k_cache, v_cache)]
    truth, torchs = list[Tensor](), list[Tensor]()
    for b, length in enumerate(filled.tolist()):
        for cache, x in zip(exact, (k, v), strict=True):
            cache[b, length : length + new] = x[b]
        own = {name: x[b : b + 1] if name == "alibi_slopes" else x for name, x in given.items()}
        keys, values = (x[b : b + 1, : length + new] for x in exact)
        for found, each in ((truth, torch.float64), (torchs, dtype)):
            found.append(attention(q[b : b + 1], keys, values, each, own))
    if page:
        table = torch.randperm(batch * room // page, generator=torch.Generator().manual_seed(0)).view(batch, -1)
        named["block_table"] = table.int()
        for cache in (k_cache, v_cache):
            cache.copy_(torch.empty_like(cache).view(-1, page, hkv, width).index_copy(
                0, table.flatten(), cache.view(-1, page, hkv, width)).view_as(cache))  # fmt: skip
        k_cache, v_cache = (x.view(-1, page, hkv, width) for x in (k_cache, v_cache))
    named |= {"k": k, "v": v} if new else {}
    o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=filled, **named, **given)
    assert_near([o], [torch.cat(truth)], [torch.cat(torchs)])
    held = k_cache[table].flatten(1, 2) if page else k_cache
    assert torch.equal(held, exact[0])


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize("case", one_of(4, [(each,) for each in CACHES]))
def test_caches(case: tuple[Any, ...]) -> None:
    check_cache(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHES[::5])
def test_caches_on_kernels(case: tuple[Any, ...]) -> None:
    check_cache(*case)
