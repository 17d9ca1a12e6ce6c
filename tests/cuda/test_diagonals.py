"""Numbers that positions decide by their distance, on GPUs: what is kept in memory, and that shards find theirs."""

from __future__ import annotations

import pytest

import flashgen
from flashgen.ir.text import text
from flashgen.targets.gpu.diagonals import BEYOND, diagonal_buffers, diagonal_numbers
from tests.cuda.helpers import emitted, variant_of
from tests.numeric.helpers import assert_close, normal

SPEC = """
attention a {{
    head_dim 64
    tensor slope: f32[H]
    tensor table: f32[H, 64]
    tensor near: f32[B, 64]
    tensor both: f32[B, H, 64]
    tensor row: f32[Nq] grad
    score {score}
    mask causal
}}
"""


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        ("s - slope[h] * (i - j)", []),
        ("s - slope[h] * abs(i - j)", []),
        ("s - slope[h] * log1p(abs(i - j))", ["slope[h] * log1p(abs(distance))"]),
        ("s + table[h, min(abs(i - j), 63)] - slope[h] * (i - j)", ["table[h, min(abs(distance), 63)]"]),
        # What a row's gradient reads is in no base.
        ("s + log1p(abs(i - j)) * row[i]", ["log1p(abs(distance))"]),
    ],
)
def test_what_takes_longer_than_a_read_is_kept(score: str, kept: list[str]) -> None:
    variant = variant_of(SPEC.format(score=score))
    assert [text(each) for each in diagonal_numbers(variant)] == kept
    assert bool(diagonal_buffers(variant)) == bool(kept)
    assert ("_observe(" in emitted(SPEC.format(score=score)).whole) == bool(kept)


@pytest.mark.parametrize(
    ("score", "numbers"),
    [
        ("s + cos(i - j)", 1),
        ("s + table[h, min(abs(i - j), 63)]", 3),
        ("s + near[b, min(abs(i - j), 63)]", 2),
        ("s + both[b, h, min(abs(i - j), 63)]", 2 * 3),
        ("s * cos(i - j) + table[h, min(abs(i - j), 63)]", 3 * 3),  # the score's two, and its derivative
    ],
)
def test_heads_that_share_numbers_share_memory(score: str, numbers: int) -> None:
    (buffer,) = diagonal_buffers(variant_of(SPEC.format(score=score)))
    sizes = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 77, "kv_len": 101}
    assert buffer.bytes.value(sizes) == 4 * numbers * (77 + 101 + 2 * BEYOND)


def test_shards_find_their_distances() -> None:
    """Rows, keys, heads and batch entries that begin anywhere: each reads what it would read in the whole."""
    B, H, N = 2, 4, 90
    op = flashgen.loads(
        "attention apart { head_dim 64  tensor near: f32[B, 2 * Nk]  tensor far: f32[H, Nk] "
        "score s * cos(0.1 * (i - j)) + near[b, Nk + i - j] + far[h, abs(i - j)] mask causal }",
        backend="emulator",
    )
    q, k, v = (normal(B, H, N, 64, seed=seed) for seed in range(3))
    tables = {"near": normal(B, 2 * N, seed=3), "far": normal(H, N, seed=4)}
    whole, whole_lse = op(q, k, v, **tables, return_lse=True)
    totals = {"b_total": B, "h_total": H, "q_total": N, "kv_total": N}
    for b, h, rows, keys in ((0, 2, slice(0, 50), slice(0, 90)), (1, 0, slice(37, 90), slice(0, 90))):
        heads = slice(b, b + 1), slice(h, h + 2)
        starts = {"b_start": b, "h_start": h, "q_start": rows.start, "kv_start": keys.start}
        o, lse = op(q[*heads, rows], k[*heads, keys], v[*heads, keys], **tables, **starts, **totals, return_lse=True)
        assert_close(o, whole[*heads, rows], 1e-6, "o")
        assert_close(lse, whole_lse[*heads, rows], 1e-6, "lse")
    halves = [
        op(q, k[:, :, keys], v[:, :, keys], **tables, kv_start=keys.start, kv_total=N, return_lse=True)[1]
        for keys in (slice(0, 31), slice(31, N))
    ]
    assert_close(halves[0].logaddexp(halves[1]), whole_lse, 1e-6, "lse of halves")
