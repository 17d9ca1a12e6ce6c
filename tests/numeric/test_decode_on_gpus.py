"""``op.decode`` by the kernels for GPUs, on the emulator: blocks find their rows by themselves, in entries or pages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.hosts.emulated import recording
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.op.cached import CachedEngine
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.targets.gpu.bytes import COUNTED
from flashgen.verification import fitting, random_inputs
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import relative_error

from .helpers import SPECS, dtypes
from .test_decode import CAUSAL, PADDING, TOLERANCE, i32, random

B, HKV, CAPACITY = 3, 2, 256
LENGTHS = i32(200, 9, 77)
# Heads that are told apart by scores, masks, sinks and weights; distances, norms, params by length, what masks read.
RICH = """
attention rich_cache {
    head_dim 32, 32/16
    tensor slope: f32[H]
    tensor by_key: f32[B, Nk]
    tensor by_head: bf16[H, Nk]
    tensor doc: i32[B, Nk]
    param ell: f32 = 1 / Nk
    score s - slope[h] * (i - j) + by_key[b, j] * ell + by_head[h, j]
    mask causal and (i - j < 40 + 30 * h or j < 2) and (doc[b, i] == doc[b, j] or h == 1)
    weights softmax(sink = slope[h] + i / Nq)
    dropout 0.5
}
"""
FORMS = {
    "rich": RICH,
    "sigmoid": "attention cache_sigmoid { head_dim 32  mask causal  weights sigmoid(s) }",
    "gaussian": "attention cache_gaussian { head_dim 32  score -sqdist / 20  mask causal }",
    "squares": "attention cache_squares { head_dim 32  mask causal and h % 2 == 0  weights normalize2(s * s) }",
    "kernel": "attention cache_kernel { head_dim 32  weights normalize(exp(s) + 1e-3) }",
    "shared": "attention cache_shared { head_dim 48  score s - 0.1 * abs(i - j)  mask i - j < 50 }",
}


@functools.cache
def emulated(text: str, target: str = "sm_80") -> AttentionOp:
    return flashgen.loads(text, backend="emulator", target=target)


def captured(op: AttentionOp, heads: int) -> dict[str, Any]:
    if not op.spec.tensors:
        return {}
    return {
        "slope": 0.1 * random(heads, seed=5).abs(),
        "by_key": random(B, CAPACITY, seed=6),
        "by_head": random(heads, CAPACITY, seed=7).bfloat16(),
        "doc": (torch.arange(CAPACITY) // 30 % 4).int().expand(B, CAPACITY),
    }


def inputs(op: AttentionOp, heads: int, queries: int, dtype: torch.dtype, width: int = 0) -> tuple[Tensor, ...]:
    D = op.spec.head_dims[-1]
    q = random(B, heads, queries, D.qk, dtype=dtype)
    k, v = (random(B, HKV, CAPACITY, width, seed=n, dtype=dtype) for n, width in ((1, D.qk), (2, D.v)))
    return q, k, v


def in_pages(cache: Tensor, page: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """The rows in shuffled pages, and where they are; NaN in pages of nobody and behind the last row."""
    each = -(-CAPACITY // page)
    places = torch.randperm(B * each + spare, generator=torch.Generator().manual_seed(page))[: B * each].view(B, each)
    pages = torch.full((B * each + spare, HKV, page, cache.shape[3]), torch.nan, dtype=cache.dtype)
    padded = torch.full((B, HKV, each * page, cache.shape[3]), torch.nan, dtype=cache.dtype)
    padded[:, :, :CAPACITY] = cache
    pages[places] = padded.view(B, HKV, each, page, cache.shape[3]).transpose(1, 2)
    return pages, places.int()


def check(op: AttentionOp, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **given: Any) -> Tensor:
    """O and lse beside the reference's; the former."""
    has_lse = op.spec.weights.form.normalised
    found = op.decode(q, k, v, lengths, return_lse=has_lse, **given)
    given = {name: x.clone() if name in ("k", "v") else x for name, x in given.items() if name != "num_splits"}
    exact = op.reference.decode(q, k, v, lengths, return_lse=has_lse, **given)
    o: Tensor = found[0] if has_lse else found
    truth = exact[0] if has_lse else exact
    assert relative_error(o, truth) < TOLERANCE[q.dtype]
    if has_lse:
        lse, truth = found[1], exact[1]
        assert torch.equal(lse.isinf(), truth.isinf())
        assert relative_error(lse.masked_fill(lse.isinf(), 0), truth.masked_fill(truth.isinf(), 0)) < 1e-4
    return o


@pytest.mark.parametrize(
    ("form", "dtype", "target"),
    [
        *(("rich", dtype, "sm_80") for dtype in TOLERANCE),
        *((form, torch.float16, "sm_80") for form in ("sigmoid", "gaussian", "squares")),
        ("rich", torch.bfloat16, "sm_90a"),
        *(
            pytest.param(form, dtype, target, marks=pytest.mark.slow)
            for form in FORMS
            for dtype in TOLERANCE
            for target in ("sm_75", "sm_80", "sm_90a")
        ),
    ],
)
def test_each_sequence_is_a_part_of_a_dense_call(form: str, dtype: torch.dtype, target: str) -> None:
    """Rows of a tile are of several heads; parts of keys are merged, whatever is left of them by the mask."""
    op = emulated(FORMS[form], target)
    q, k, v = inputs(op, 6, 3, dtype)
    for splits in (1, 3, 0):
        check(op, q, k, v, LENGTHS, leftpad=PADDING, num_splits=splits, **captured(op, 6))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "name",
    [
        "alibi",
        "gpt_oss",
        "gemma2_local",
        "t5",
        "packed_documents",
        "cosine",
        "medusa",
        "relative_bias",
        "bigbird",
        "mla",
    ],
)
def test_of_the_gallery(name: str, target: str) -> None:
    op = flashgen.load(SPECS / f"{name}.attn", backend="emulator", target=target)
    shape = fitting(op.spec, Shape(2, 4, 2, 150, 150))
    for element in dtypes(op.spec):
        given = random_inputs(op.spec, shape, op.spec.head_dims[0], TORCH_DTYPES[element], seed=1)
        lengths = i32(shape.kv_len, shape.kv_len // 2)
        for splits in (1, 3):
            check(op, given.q[:, :, :2], given.k, given.v, lengths, num_splits=splits, **given.named)


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (2, 1), (10, 7), (4, 128)])
def test_heads_of_a_group_are_rows(heads: int, queries: int) -> None:
    """8 heads and one query are a warp's; more rows than a tile has, tiles that end within a position."""
    op = emulated(CAUSAL)
    q, k, v = inputs(op, heads, queries, torch.bfloat16)
    check(op, q, k, v, i32(200, 130, 256), num_splits=2)
    rich = emulated(RICH)
    q, k, v = inputs(rich, heads, queries, torch.float16)
    check(rich, q, k, v, i32(200, 130, 256), **captured(rich, heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "parts"), [(4, 150), (40, 40)])
def test_parts_are_merged_in_several_rounds(heads: int, parts: int, dtype: torch.dtype) -> None:
    """More than are weighed at a time. Scores grow with the position, then fall, so that each part counts from another
    maximum.
    """
    text = "attention cache_of_many_parts { head_dim 64  weights %s }"
    rows = parts * 64
    height = 1.5 - (torch.arange(rows) / rows - 0.6).abs()
    for name in ("softmax", "normalize(s * s)"):
        op = emulated(text.replace("parts", name.partition("(")[0]) % name)
        q = random(1, heads, 1, 64, dtype=dtype)
        k, v = (random(1, 1, rows, 64, seed=n, dtype=dtype) for n in (1, 2))
        k = (k + 4 * q.mean(1, keepdim=True)) * height[:, None].to(dtype)
        check(op, q, k, v, torch.tensor([rows], dtype=torch.int32), num_splits=parts)


@pytest.mark.parametrize(
    ("page", "target"), [(1, "sm_80"), (16, "sm_80"), (24, "sm_80"), (256, "sm_80"), (16, "sm_90a")]
)
def test_pages_hold_the_same_rows(page: int, target: str) -> None:
    """NaN lies in every row that is none of the call's: a kernel that multiplied one would show."""
    op = emulated(CAUSAL, target)
    q, k, v = inputs(op, 8, 2, torch.bfloat16)
    (k_pages, table), (v_pages, _) = in_pages(k, page), in_pages(v, page)
    for padding in (None, PADDING):
        dense = op.decode(q, k, v, LENGTHS, leftpad=padding, num_splits=2)
        found = op.decode(q, k_pages, v_pages, LENGTHS, block_table=table, leftpad=padding, num_splits=2)
        assert torch.equal(found, dense)
    check(op, q, k_pages, v_pages, LENGTHS, block_table=table, leftpad=PADDING)


def test_entries_of_a_larger_cache_and_views() -> None:
    op = emulated(CAUSAL)
    q, k, v = inputs(op, 8, 1, torch.bfloat16)
    wanted = op.decode(q, k, v, LENGTHS)
    entries = i32(3, 0, 4)
    larger = [torch.full((5, CAPACITY, HKV, 64), torch.nan, dtype=k.dtype).transpose(1, 2) for _ in range(2)]
    for to, x in zip(larger, (k, v), strict=True):
        to[entries.long()] = x
    assert torch.equal(op.decode(q, larger[0], larger[1], LENGTHS, cache_batch_idx=entries), wanted)
    by_row = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(op.decode(by_row, k, v, LENGTHS), wanted)


@pytest.mark.parametrize("page", [0, 16])
def test_new_rows_are_written_first(page: int) -> None:
    op = emulated(CAUSAL)
    q, k, v = inputs(op, 8, 2, torch.bfloat16)
    new = [random(B, HKV, 3, 64, seed=n, dtype=q.dtype) for n in (8, 9)]
    want = [x.clone() for x in (k, v)]
    for b, length in enumerate(LENGTHS.tolist()):
        for to, x in zip(want, new, strict=True):
            to[b, :, length : length + 3] = x[b]
    wanted = op.decode(q, want[0], want[1], LENGTHS + 3)
    given: dict[str, Any] = {}
    if page:
        (k, given["block_table"]), (v, _) = in_pages(k, page), in_pages(v, page)
    assert torch.equal(op.decode(q, k, v, LENGTHS, k=new[0], v=new[1], **given), wanted)


def test_what_is_empty_or_far() -> None:
    """Sequences whose every row is padding; scores whose exponents would be rounded away, in parts of their own."""
    op = emulated(CAUSAL)
    q, k, v = inputs(op, 8, 1, torch.float32)
    o = check(op, q, k, v, i32(200, 5, 1), leftpad=i32(200, 5, 0), num_splits=4)
    assert (o[:2] == 0).all()
    check(op, 3000 * q, k, v, LENGTHS, num_splits=3)
    assert op.decode(q[:0], k[:0], v[:0], LENGTHS[:0]).shape == (0, 8, 1, 64)


def test_it_is_the_same_again_and_by_the_device_alone() -> None:
    """However long sequences are the number of parts follows from the room that they have."""
    op = emulated(CAUSAL)
    q = random(1, 2, 1, 64, dtype=torch.bfloat16)
    k, v = (random(1, 1, 4096, 64, seed=n, dtype=q.dtype) for n in (1, 2))
    with recording() as counted:
        found = [op.decode(q, k, v, 300 + n // 2 * 3000) for n in range(4)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert len({each.values["splits"] for each in counted}) == 1
    assert counted[0].values["splits"] > 1
    assert relative_error(found[2], op.reference.decode(q, k, v, 3300)) < TOLERANCE[q.dtype]


BAD: dict[str, dict[str, Tensor]] = {
    "too long": {"cache_seqlens": i32(200, 2**31 - 1, 77)},
    "negative": {"cache_seqlens": i32(200, -5, 77)},
    "shorter than its queries": {"cache_seqlens": i32(200, 1, 77)},
    "negative padding": {"leftpad": i32(3, -9, 70)},
    "padding beyond the end": {"leftpad": i32(3, 400, 70)},
    "entry behind the last": {"cache_batch_idx": i32(0, 7, 2)},
    "negative entry": {"cache_batch_idx": i32(0, -7, 2)},
}


@pytest.mark.parametrize("bad", [*BAD, "pages behind the last"])
def test_numbers_that_nobody_checked(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels stay inside of the tensors, and right sequences stay right."""
    op = emulated(RICH)
    q, k, v = inputs(op, 6, 3, torch.bfloat16)
    given: dict[str, Any] = {"cache_seqlens": LENGTHS, "leftpad": PADDING}
    right = op.decode(q, k, v, **given, ell=1 / 256, **captured(op, 6))
    if bad in BAD:
        given |= BAD[bad]
    else:
        (k, given["block_table"]), (v, _) = in_pages(k, 16), in_pages(v, 16)
        given["block_table"][1] = i32(2**31 - 1, -(2**31), 51, 5, *([-1] * 12))
    monkeypatch.setattr(CachedEngine, "_sees", lambda *_: False)
    found = op.decode(q, k, v, **given, ell=1 / 256, **captured(op, 6))
    assert torch.equal(found[::2], right[::2])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="sequence 1"):
        op.decode(q, k, v, **given, **captured(op, 6))


@pytest.mark.parametrize(
    ("text", "heads", "queries"),
    [
        (CAUSAL, 6, 1),
        (RICH, 6, 3),
        *(
            pytest.param(text, heads, queries, marks=pytest.mark.slow)
            for text in (CAUSAL, RICH, FORMS["shared"], FORMS["squares"])
            for heads, queries in ((6, 1), (6, 3), (40, 3))
        ),
    ],
)
def test_bytes_are_those_of_the_tiles_that_are_visited(text: str, heads: int, queries: int) -> None:
    op = emulated(text)
    q, k, v = inputs(op, heads, queries, torch.bfloat16)
    for splits in (1, 3):
        with recording() as counted:
            op.decode(q, k, v, LENGTHS, leftpad=PADDING, num_splits=splits, **captured(op, heads))
        given = Inputs(q, k, v, captured(op, heads), {}, q, q)
        moved = hbm_bytes(op, given, counted)
        assert moved["forward"].predicted == moved["forward"].counted


def test_an_entry_too_large_for_32_bits_is_refused() -> None:
    """An entry, or a page; all together may be larger."""
    kernel = emulated(CAUSAL)._parts.kernels["cpu"]
    assert kernel is not None
    dense = kernel(HeadDim(64, 64), 0)
    assert dense is not None
    cached = dense.of(CACHED)
    assert cached is not None
    layout = cached.layout
    known = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 1, "kv_len": 400, "group_rows": 2, "element": 1}
    known |= {"q_stride_b": 128, "q_stride_h": 64, "q_stride_n": 64, "cache_entries": 100, "cache_rows": 4}
    for name in ("k", "v"):
        known |= {f"{name}_stride_b": 2**31, f"{name}_stride_h": 64, f"{name}_stride_n": 64}
    cached.prepare("forward", layout.values(known))
    known["k_stride_n"] = 2**30
    with pytest.raises(ValueError, match="an entry or page of the cache, reach over more than"):
        cached.prepare("forward", layout.values(known))


def test_what_runs_is_explained() -> None:
    op = emulated(CAUSAL, "sm_90a")
    q, cache = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16), torch.zeros(9, 8, 64, 64, dtype=torch.bfloat16)
    table = torch.zeros(1, 128, dtype=torch.int32)
    found = op.explain_decode(q, cache, cache, block_table=table, num_splits=5)
    with recording() as counted:
        op.decode(q, cache, cache, 8192, block_table=table, num_splits=5)
    (ran,) = counted
    parts, _ = ran.launches.launches
    assert [each.name for each in found.forward.kernels] == [parts.kernel]  # of few parts, which its last block merges
    assert [each.blocks for each in found.forward.kernels] == [5 * 8]
    assert "merged by the last block" in str(found)
    assert (found.forward.Br, found.forward.warps) == (16, 4)
    moved = sum(each.total for name, each in ran.report.traffic.items() if name in COUNTED)
    assert found.forward.hbm_bytes == moved
    assert "in 5 parts" in str(found)
    assert "a warpgroup 64" in str(found)
    with pytest.raises(ValueError, match="explain_decode says what calls with pairs run on GPUs"):
        flashgen.loads(CAUSAL, backend="reference").explain_decode(q, cache, cache, block_table=table)


def test_latent_keys_are_values_too() -> None:
    op = emulated("attention latent_cache { head_dim 576/512  mask causal }")
    q, k = random(2, 16, 1, 576).bfloat16(), random(2, 1, 50, 576, seed=1).bfloat16()
    lengths = i32(50, 23)
    found = op.decode(q, k, k[..., :512], lengths, num_splits=2)
    assert relative_error(found, op.reference.decode(q, k, k[..., :512], lengths)) < TOLERANCE[torch.bfloat16]


def test_of_blocks_that_merge_columns_one_writes_lse() -> None:
    """Where warps share rows several blocks have columns of the first warp's."""
    op = emulated("attention wide_cache { head_dim 400/384 }")
    q, k, v = (
        random(1, 4, 17, 400).bfloat16(),
        random(1, 1, 90, 400, seed=1).bfloat16(),
        random(1, 1, 90, 384).bfloat16(),
    )
    found, lse = op.decode(q, k, v, i32(90), num_splits=2, return_lse=True)
    exact, exact_lse = op.reference.decode(q, k, v, i32(90), return_lse=True)
    assert relative_error(found, exact) < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
