"""``flash_attn_with_kvcache`` against FlashAttention's formula of each sequence, in float64, and what it refuses."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen import flash
from flashgen.op.signature import F8

from .test_arguments import exact
from .test_dense import TOLERANCE, formula

flash_attn_with_kvcache: Any = flash.flash_attn_with_kvcache  # its arguments are what is tested
B, H, HKV, D, ROOM = 3, 4, 2, 16, 64
LENGTHS = torch.tensor([40, 9, 0], dtype=torch.int32)
SLOPES = torch.rand(B, H, generator=torch.Generator().manual_seed(3))


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def inputs(queries: int = 1, new: int = 1) -> dict[str, Any]:
    return {
        "q": random(B, queries, H, D, seed=1),
        "k_cache": random(B, ROOM, HKV, D, seed=2),
        "v_cache": random(B, ROOM, HKV, D, seed=3),
        "k": random(B, new, HKV, D, seed=4),
        "v": random(B, new, HKV, D, seed=5),
    }


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rows [N, H, D] by angles [N, R / 2], as a product of complex numbers."""
    count = 2 * angles.shape[-1]
    y, rest = x[..., :count].double(), x[..., count:].double()
    y = y.reshape(*y.shape[:-1], -1, 2) if interleaved else torch.stack(y.chunk(2, -1), -1)
    turned = torch.view_as_real(
        torch.view_as_complex(y.contiguous()) * torch.polar(torch.ones(()).double(), angles)[:, None]
    )
    return torch.cat([turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1), rest], -1)


def wanted(
    given: dict[str, Tensor],
    lengths: Tensor,
    angles: Tensor | None = None,
    interleaved: bool = True,
    leftpad: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """o and lse, and the cache of ``given`` brought up to date, sequence by sequence."""
    rows, sums = [], []
    moves = options.get("causal") or options.get("window_size", (-1, -1)) != (-1, -1)
    for b, length in enumerate(lengths.tolist()):
        q, k, v = given["q"][b], given["k"][b], given["v"][b]
        if angles is not None:
            at = length + torch.arange(len(q)) * (1 if moves else 0)
            q, k = rotate(q, angles[at], interleaved), rotate(k, angles[length : length + len(k)], interleaved)
        end = length + len(k)
        given["k_cache"][b, length:end], given["v_cache"][b, length:end] = k.float(), v
        first = 0 if leftpad is None else int(leftpad[b])
        own = dict(options)
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        keys, values = given["k_cache"][b : b + 1, first:end], given["v_cache"][b : b + 1, first:end]
        o, lse = formula(q[None], keys, values, **own)
        rows.append(o)
        sums.append(lse)
    return torch.cat(rows), torch.cat(sums)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, 0), "softcap": 2.0},
    {"window_size": (7, 1), "scale": 0.3},
    {"causal": True, "alibi_slopes": SLOPES},
    {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize(("queries", "new"), [(1, 1), (4, 4), (2, 5), (3, 1)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula(options: dict[str, Any], queries: int, new: int) -> None:
    """Of three queries over one row, too: the first two stand before all keys."""
    own, exact = inputs(queries, new), inputs(queries, new)
    truth, sums = wanted(exact, LENGTHS, **options)
    passed = {"softmax_scale" if name == "scale" else name: x for name, x in options.items()}
    o, lse = flash_attn_with_kvcache(**own, cache_seqlens=LENGTHS, return_softmax_lse=True, **passed)
    torch.testing.assert_close(o.double(), truth, **TOLERANCE)
    torch.testing.assert_close(lse.double(), sums, **TOLERANCE)
    assert torch.equal(own["k_cache"], exact["k_cache"])
    assert torch.equal(own["v_cache"], exact["v_cache"])


@pytest.mark.parametrize("page", [1, 8, 32])
def test_pages_and_padding(page: int) -> None:
    own, exact = inputs(2, 2), inputs(2, 2)
    leftpad = torch.tensor([7, 3, 0], dtype=torch.int32)
    truth, _ = wanted(exact, LENGTHS, leftpad=leftpad, causal=True)
    table = torch.randperm(B * ROOM // page, generator=torch.Generator().manual_seed(0)).view(B, -1).int()
    for name in ("k_cache", "v_cache"):
        pages = torch.empty(B * ROOM // page, page, HKV, D)
        pages[table.long()] = own[name].unflatten(1, (-1, page))
        own[name] = pages
    o = flash_attn_with_kvcache(
        **own, cache_seqlens=LENGTHS, block_table=table, cache_leftpad=leftpad, causal=True, num_splits=3
    )
    torch.testing.assert_close(o.double(), truth, **TOLERANCE)
    assert torch.equal(own["k_cache"][table.long()].flatten(1, 2), exact["k_cache"])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 2)}], ids=str)
@pytest.mark.parametrize("columns", [8, 3])
def test_rotary_embedding(options: dict[str, Any], interleaved: bool, columns: int) -> None:
    """Of all features and of some; new keys lie rotated in the cache."""
    angles = torch.arange(ROOM)[:, None] / 10.0 ** torch.arange(columns).double()
    own, exact = inputs(3, 3), inputs(3, 3)
    truth, _ = wanted(exact, LENGTHS, angles, interleaved, **options)
    o = flash_attn_with_kvcache(
        **own,
        rotary_cos=angles.cos().float(),
        rotary_sin=angles.sin().float(),
        cache_seqlens=LENGTHS,
        rotary_interleaved=interleaved,
        **options,
    )
    torch.testing.assert_close(o.double(), truth, **TOLERANCE)
    torch.testing.assert_close(own["k_cache"], exact["k_cache"])


def test_entries_and_lengths_by_number_or_none() -> None:
    given = inputs()
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    entries = torch.tensor([2, 0, 1])
    whole = flash_attn_with_kvcache(q, k_cache, v_cache)
    torch.testing.assert_close(whole.double(), formula(q, k_cache, v_cache)[0], **TOLERANCE)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ROOM), whole)
    found = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7, cache_batch_idx=entries)
    truth = formula(q, k_cache[entries, :7], v_cache[entries, :7])[0]
    torch.testing.assert_close(found.double(), truth, **TOLERANCE)


def test_sequences_that_are_shorter_than_their_queries() -> None:
    given = inputs(5)
    own = {name: given[name] for name in ("q", "k_cache", "v_cache")}
    lengths = torch.tensor([3, 0, 9])
    every: list[dict[str, Any]] = [{"causal": True}, {}, {"window_size": (2, 1), "alibi_slopes": SLOPES}]
    for options in every:
        o, lse = flash_attn_with_kvcache(**own, cache_seqlens=lengths, return_softmax_lse=True, **options)
        for b, length in enumerate(lengths.tolist()):
            slopes: dict[str, Any] = {"alibi_slopes": SLOPES[b : b + 1]} if "alibi_slopes" in options else {}
            rows = (given[name][b : b + 1, :length] for name in ("k_cache", "v_cache"))
            truth, sums = formula(given["q"][b : b + 1], *rows, **{**options, **slopes})
            torch.testing.assert_close(o[b : b + 1].double(), truth, **TOLERANCE)
            torch.testing.assert_close(lse[b : b + 1].double(), sums, **TOLERANCE)
    assert (lse[1] == -math.inf).all()
    numbers: tuple[Any, Any] = (np.int64(3), 3)
    of_numpy, of_python = (flash_attn_with_kvcache(**own, cache_seqlens=each, causal=True) for each in numbers)
    assert torch.equal(of_numpy, of_python)
    nothing = {name: x[:0] for name, x in own.items()}
    assert flash_attn_with_kvcache(**nothing, cache_seqlens=1).shape == (0, 5, H, D)


# What versions 3 and 4 added; specs run on the reference. -------------------------------------------------------------


def second_query_and_chunks(given: dict[str, Any], lengths: Tensor, leftpad: Tensor, chunk: int) -> list[Tensor]:
    """o of each sequence, whose keys count from its padding."""
    found = []
    for b, (length, first) in enumerate(zip(lengths.tolist(), leftpad.tolist(), strict=True)):
        rows = (given["q"][b : b + 1], *(given[name][b : b + 1, first:length] for name in ("k_cache", "v_cache")))
        found.append(exact(rows, lambda i, j: (j <= i) & (i // chunk == j // chunk), given["qv"][b : b + 1])[0])
    return found


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("new", [0, 1, 3])
def test_chunks_and_a_second_query(new: int) -> None:
    """Of sequences that are shorter than their queries, too; new rows are written to both caches."""
    own = inputs(3, new) | {"qv": random(B, 3, H, D, seed=6)}
    leftpad = torch.tensor([7, 3, 0], dtype=torch.int32)
    truth = {name: x.clone() for name, x in own.items()}
    for b, length in enumerate(LENGTHS.tolist()):
        for name in "kv":
            truth[f"{name}_cache"][b, length : length + new] = truth[name][b]
    wanted = second_query_and_chunks(truth, LENGTHS + new, leftpad, 4)
    if new == 0:
        own |= {"k": None, "v": None}
    o = flash_attn_with_kvcache(
        **own, cache_seqlens=LENGTHS, cache_leftpad=leftpad, attention_chunk=4, causal=True, num_splits=2
    )
    torch.testing.assert_close(o.double(), torch.cat(wanted), **TOLERANCE)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(own[name], truth[name])


@pytest.mark.usefixtures("on_reference")
def test_positions_of_the_rotary_embedding() -> None:
    angles = torch.arange(ROOM)[:, None] / 10.0 ** torch.arange(8).double()
    own = inputs(2, 2)
    at = torch.tensor([3, 0, 11])
    k = torch.stack([rotate(x, angles[n : n + 2], True) for x, n in zip(own["k"], at.tolist(), strict=True)])
    q = torch.stack([rotate(x, angles[n : n + 2], True) for x, n in zip(own["q"], at.tolist(), strict=True)])
    plain = {**inputs(2, 2), "q": q.float(), "k": k.float()}
    wanted = flash_attn_with_kvcache(**plain, cache_seqlens=LENGTHS, causal=True)
    rotary: dict[str, Any] = {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}
    o = flash_attn_with_kvcache(**own, **rotary, cache_seqlens=LENGTHS, rotary_seqlens=at, causal=True)
    torch.testing.assert_close(o, wanted, **TOLERANCE)
    torch.testing.assert_close(own["k_cache"], plain["k_cache"])
    for wrong, kind in ((at[:2], ValueError), (at.float(), ValueError), ("3", TypeError)):
        with pytest.raises(kind, match="'rotary_seqlens'"):
            flash_attn_with_kvcache(**inputs(2, 2), **rotary, cache_seqlens=LENGTHS, rotary_seqlens=wrong)


@pytest.mark.usefixtures("on_reference")
def test_rows_of_a_larger_table() -> None:
    own = inputs()
    table = torch.randperm(5 * 8, generator=torch.Generator().manual_seed(0)).view(5, 8).int()
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    pages = {name: random(40, 8, HKV, D, seed=n) for n, name in enumerate(("k_cache", "v_cache"))}
    given = {**own, **pages, "k": None, "v": None, "cache_seqlens": LENGTHS + 1}
    wanted = flash_attn_with_kvcache(**given, block_table=table[rows.long()])
    assert torch.equal(flash_attn_with_kvcache(**given, page_table=table, cache_batch_idx=rows), wanted)
    with pytest.raises(ValueError, match="'cache_batch_idx' names a row of 'block_table' that is none; it has 5"):
        flash_attn_with_kvcache(**given, page_table=table, cache_batch_idx=rows + 1)
    with pytest.raises(TypeError, match="'block_table' and 'page_table' are two names of one argument"):
        flash_attn_with_kvcache(**given, page_table=table, block_table=table)


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("form", ["entries", "pages"])
@pytest.mark.parametrize("bits", [8, 32])
def test_queries_of_any_lengths(form: str, bits: int) -> None:
    counts, leftpad = (2, 0, 5), torch.tensor([7, 3, 0], dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q, lengths = random(7, H, D, seed=1), torch.tensor([40, 9, 3], dtype=torch.int32)
    k, v = (random(5, ROOM, HKV, D, seed=n) for n in (2, 3))
    entries, factors = torch.tensor([4, 0, 2]), dict[str, Any]()
    if bits == 8:
        k, v, factors = k.to(F8), v.to(F8), {"k_descale": torch.rand(B, HKV) + 0.5, "v_descale": 0.5}
    where: dict[str, Any] = {"cache_batch_idx": entries}
    k_cache, v_cache = k, v
    if form == "pages":
        where = {"page_table": entries[:, None] * 8 + torch.arange(8)}
        k_cache, v_cache = (x.reshape(40, 8, HKV, D) for x in (k, v))
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=leftpad, cu_seqlens_q=starts, max_seqlen_q=5,
        causal=True, return_softmax_lse=True, **where, **factors,
    )  # fmt: skip
    for b, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        rows = [x[entries[b]][None, int(leftpad[b]) : int(lengths[b])].double() for x in (k, v)]
        if bits == 8:
            rows = [rows[0] * factors["k_descale"][b][:, None], rows[1] * 0.5]
        part, sums = exact((q[begin:end][None], *rows), lambda i, j: j <= i)
        torch.testing.assert_close(o[begin:end].double(), part[0], **TOLERANCE)
        torch.testing.assert_close(lse[:, begin:end].double(), sums[0], **TOLERANCE)
    with pytest.raises(ValueError, match="'cu_seqlens_q' goes with rows that a cache has: write k and v to it first"):
        flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=lengths, cu_seqlens_q=starts)
    with pytest.raises(ValueError, match=r"'q' has shape \[1, 7, 4, 16\]; \[Tq, H, D\] is expected"):
        flash_attn_with_kvcache(q[None], k, v, cache_seqlens=lengths, cu_seqlens_q=starts)


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("name", ["q", "k and v", "q, k and v"])
def test_rows_of_eight_bits(name: str) -> None:
    """q is widened; k and v are written as they are."""
    own = inputs()
    factors: dict[str, Any] = {"k_descale": torch.rand(B, HKV) + 0.5, "v_descale": 0.25}
    own |= {each: own[each].to(F8) for each in ("k_cache", "v_cache", *name.replace(" and", ",").split(", "))}
    exact_rows = {each: x.float() for each, x in own.items()}
    for each, other in (("k", "k_cache"), ("v", "v_cache")):
        if "k" not in name:
            written = own[each] / torch.as_tensor(factors[f"{each}_descale"]).expand(B, HKV)[:, None, :, None]
            exact_rows[each] = written.to(F8).float()
        for b, length in enumerate(LENGTHS.tolist()):
            exact_rows[other][b, length] = exact_rows[each][b, 0]
    if "q" in name:
        factors["q_descale"] = torch.rand(B, HKV) + 0.5
        exact_rows["q"] *= factors["q_descale"].repeat_interleave(2, 1)[:, None, :, None]
    o = flash_attn_with_kvcache(**own, **factors, cache_seqlens=LENGTHS)
    assert o.dtype is (torch.bfloat16 if "q" in name else torch.float32)
    for b, length in enumerate(LENGTHS.tolist()):
        k = exact_rows["k_cache"][b : b + 1, : length + 1] * factors["k_descale"][b][:, None]
        v = exact_rows["v_cache"][b : b + 1, : length + 1] * 0.25
        truth, _ = formula(exact_rows["q"][b : b + 1], k, v)
        torch.testing.assert_close(o[b : b + 1].double(), truth, rtol=2**-8 if "q" in name else 2e-5, atol=2e-5)
    for each in ("k_cache", "v_cache"):
        for b, length in enumerate(LENGTHS.tolist()):
            assert torch.equal(own[each][b, length].float(), exact_rows[each][b, length])


def test_the_order_of_arguments_is_that_of_flashattention() -> None:
    names = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table"
    names += " softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    names += " by_name"  # others stand elsewhere in each of FlashAttention's versions
    assert list(inspect.signature(flash_attn_with_kvcache).parameters) == names.split()


WRONG: dict[str, dict[str, Any]] = {
    "'q' has shape": {"q": torch.zeros(3, 4, 16)},
    "'k_cache' must be a tensor": {"k_cache": None},
    "expected q \\[B, Nq, H, D\\]": {"v_cache": torch.zeros(3, 63, 2, 16)},
    "H must be a multiple of Hkv": {"q": torch.zeros(3, 1, 5, 16)},
    "pass both, or neither": {"v": None},
    "'k' has shape": {"k": torch.zeros(3, 1, 1, 16)},
    "'v' has shape": {"v": torch.zeros(3, 2, 2, 16)},
    "'cache_seqlens' is missing": {"cache_seqlens": None},
    "'cache_seqlens' must be a tensor": {"cache_seqlens": [1, 2, 3], "k": None, "v": None},
    "what is new make 65 rows of sequence 0": {"cache_seqlens": 64},
    "'alibi_slopes' has shape": {"alibi_slopes": torch.zeros(3)},
    "'softcap' is -1": {"softcap": -1.0},
    "'num_splits' is -2": {"num_splits": -2},
    "'leftpad' of sequence 0 is 50, of 41 rows": {"cache_leftpad": torch.tensor([50, 0, 0])},
    "'block_table' has shape": {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    "'rotary_sin' must be a tensor": {"rotary_cos": torch.zeros(64, 8)},
    "'rotary_cos' has shape": {"rotary_cos": torch.zeros(63, 8), "rotary_sin": torch.zeros(64, 8)},
    "'rotary_sin' has shape": {"rotary_cos": torch.zeros(64, 8), "rotary_sin": torch.zeros(64, 9)},
    "they differ": {"rotary_cos": torch.zeros(64, 8), "rotary_sin": torch.zeros(64, 7)},
    "'rotary_cos' is torch.float16": dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(64, 8).half()),
    "'q' is torch.float8_e4m3fn, but 'k_cache' is torch.float32; q of 8 bits goes with a cache of 8 bits": {
        "q": torch.zeros(3, 1, 4, 16).to(F8)
    },
    "'k' is torch.float8_e4m3fn on cpu; the cache is torch.float32": {"k": torch.zeros(3, 1, 2, 16).to(F8)},
    "'q_descale' goes with q": {"q_descale": 2.0},
    "rotate rows before they are of 8 bits": {
        **dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(64, 8)), "k": torch.zeros(3, 1, 2, 16).to(F8)
    },
    "rotate what is new": dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(64, 8)) | {"k": None, "v": None},
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_what_does_not_fit_is_named(said: str) -> None:
    given: dict[str, Any] = {**inputs(), "cache_seqlens": LENGTHS}
    flash_attn_with_kvcache(**given)
    with pytest.raises((ValueError, TypeError), match=said):
        flash_attn_with_kvcache(**{**given, **WRONG[said]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_compiled_whole() -> None:
    angles = torch.arange(ROOM)[:, None] / 10.0 ** torch.arange(8)
    rotary: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(given: dict[str, Any], lengths: Tensor) -> Any:
        return flash_attn_with_kvcache(**given, **rotary, cache_seqlens=lengths, causal=True) * 2

    own, theirs = inputs(), inputs()
    eager = flash_attn_with_kvcache(**theirs, **rotary, cache_seqlens=LENGTHS, causal=True) * 2
    assert torch.equal(step(own, LENGTHS), eager)
    assert torch.equal(own["k_cache"], theirs["k_cache"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_for_any_batch() -> None:
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

    given = inputs()
    for batch in (3, 2):
        q, k, v = (given[name][:batch] for name in ("q", "k_cache", "v_cache"))
        lengths = LENGTHS[:batch] + 1
        wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        assert torch.equal(step(q, k, v, lengths), wanted)
