"""A shard computes what the whole computes there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from flashgen.reference.dense import Dropout, attention
from flashgen.reference.shard import Shard
from tests.reference.helpers import qkv, random, spec

BODY = """
tensor slope: f32[H]
tensor doc: i32[B, Nk]
tensor pair: f32[B, Hkv, Nq, Nk]
score s - slope[h] * abs(i - j) / (B + H + Hkv + Nq + Nk) + pair[b, hkv, i, j]
mask doc[b, i] <= doc[b, j] + 1 and j <= i + 2
layout block 4: (I + J) % 2 == 0 or I >= J
dropout 0.3
"""
DROPOUT = Dropout(0.3, 11)


def captured() -> dict[str, torch.Tensor]:
    doc = torch.arange(2 * 12).view(2, 12).remainder(3).to(torch.int32)
    return {"slope": random(4, dtype=torch.float32), "doc": doc, "pair": random(2, 2, 12, 12, dtype=torch.float32)}


def test_queries_batch_and_heads() -> None:
    q, k, v = qkv(kv_heads=2, q_len=12, kv_len=12)
    whole = Shard.whole(q.shape, k.shape)
    o, lse = attention(spec(BODY), q, k, v, tensors=captured(), shard=whole, dropout=DROPOUT)
    assert lse is not None
    for batch, kv_heads, rows in (
        (range(2), range(2), range(3, 8)),
        (range(1, 2), range(2), range(12)),
        (range(2), range(1, 2), range(12)),
        (range(1, 2), range(1), range(11, 12)),
    ):
        heads = slice(kv_heads.start * 2, kv_heads.stop * 2)
        some = (slice(batch.start, batch.stop), heads, slice(rows.start, rows.stop))
        keys = (slice(batch.start, batch.stop), slice(kv_heads.start, kv_heads.stop))
        part = whole.part(batch, kv_heads, rows)
        found = attention(spec(BODY), q[some], k[keys], v[keys], tensors=captured(), shard=part, dropout=DROPOUT)
        torch.testing.assert_close(found, (o[some], lse[some]))


def test_key_shards_merge_by_lse() -> None:
    q, k, v = qkv(kv_heads=2, q_len=12, kv_len=12)
    whole = Shard.whole(q.shape, k.shape)
    o, lse = attention(spec(BODY), q, k, v, tensors=captured(), shard=whole, dropout=DROPOUT)
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        shard = replace(whole, kv_len=stop - start, kv_start=start, kv_total=12)
        keys = slice(start, stop)
        parts.append(
            attention(spec(BODY), q, k[:, :, keys], v[:, :, keys], tensors=captured(), shard=shard, dropout=DROPOUT)
        )
    lses = torch.stack([part for _, part in parts if part is not None])
    weights = (lses - lses.logsumexp(0)).nan_to_num(0.0).exp()
    torch.testing.assert_close(lses.logsumexp(0), lse)
    torch.testing.assert_close(sum(w.unsqueeze(-1) * part for w, (part, _) in zip(weights, parts, strict=True)), o)


def test_sizes() -> None:
    shard = Shard(batch=2, heads=4, kv_heads=2, q_len=5, kv_len=6, q_start=10, h_start=4, h_total=16)
    assert shard.sizes(8, 4) == {"B": 2, "H": 16, "Hkv": 8, "Nq": 15, "Nk": 6, "D": 8, "Dv": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_start": -1}, "'q_start' is -1"),
        ({"kv_total": 5}, "'kv_total' is 5, but this call reaches to 6"),
        ({"b_total": 2**30}, "'b_total' is 1073741824; it must be less than"),
        (
            {"q_start": 2**40},
            "'q_total' is 1099511627781; it must be less than 1073741824 (2**30) (q_start = 1099511627776",
        ),
    ],
)
def test_offsets_that_cannot_be(change: dict[str, int], message: str) -> None:
    shard = replace(Shard(batch=2, heads=4, kv_heads=2, q_len=5, kv_len=6), **change)
    with pytest.raises(ValueError, match=re.escape(message)):
        shard.check()
