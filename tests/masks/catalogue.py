"""The masks whose tiles are counted: the gallery's, and what users write beyond it.

Each is the statements of a spec that say which pairs are kept. ``loose`` says why ranges alone may not decide a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH, HEADS = 2, 2  # of every call; tiles are counted for the last of both


@dataclass(frozen=True)
class Mask:
    """A name, the statements of a spec, the captured tensors that they read, the params with their values in calls."""

    name: str
    statements: str
    tensors: tuple[str, ...] = ()
    loose: str | None = None
    params: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_self_attention(self) -> bool:
        """Whether queries are found among the keys: Nq is at most Nk then."""
        return any(name in self.tensors for name in ("doc", "shuffled"))

    @property
    def spec(self) -> str:
        """A whole spec."""
        lines = [f"    tensor {name}: {DECLARATIONS[name]}" for name in self.tensors]
        declared = "\n".join((*lines, *(f"    param {name}: i32" for name in self.params)))
        return f"attention mask_under_test {{\n    head_dim 16\n{declared}\n    {self.statements}\n}}\n"


DECLARATIONS = {
    "doc": "i32[B, Nk]",
    "shuffled": "i32[B, Nk]",
    "length": "i32[B]",
    "limit": "i32[Nq]",
    "first": "i32[Nq]",
    "valid": "bool[B, Nk]",
    "blocks": "bool[H, 16, 16]",
    "time": "f32[B, Nk]",
    "wide": "i64[B, Nk]",
    "coarse": "i64[Nk // 512, H]",
}


def captured(q_len: int, kv_len: int, rng: np.random.Generator) -> Mapping[str, Any]:
    """Tensors for a problem of these lengths: sorted documents, the same in any order, lengths, ends of each row."""
    cuts = np.sort(rng.integers(1, kv_len, (BATCH, 4)), axis=1)
    doc = (np.arange(kv_len)[None, :, None] >= cuts[:, None, :]).sum(-1).astype(np.int32)
    limit = np.minimum.accumulate(rng.integers(0, kv_len + 1, q_len)[::-1])[::-1].astype(np.int32)
    return {
        "doc": doc,
        "shuffled": rng.permuted(doc, axis=1),
        "length": rng.integers(1, kv_len, BATCH).astype(np.int32),
        "limit": np.ascontiguousarray(limit),
        "first": np.maximum(limit - 40, 0).astype(np.int32),
        "valid": np.arange(kv_len)[None] < np.array([[kv_len // 3], [2 * kv_len // 3]]),
        "blocks": rng.random((HEADS, 16, 16)) < 0.3,
        "time": np.sort(rng.standard_normal((BATCH, kv_len)).astype(np.float32), axis=1),
    }


_BLOCKS = "a tile holds parts of several blocks"  # not with the tiles that the planner chooses
_ROWS = "minima and maxima of a tile are not met by one row"
_FORMS = "two blocks that one row belongs to are not compared"
_JOINT = "rows and columns of the image are decided apart"
_BITS = "bits below the highest that differs are not known"
_IDS = "a tile's ids overlap as ranges, though none is another's"

MASKS = (
    # The gallery.
    Mask("causal", "mask causal"),
    Mask("causal, lower right", "mask causal_lower_right"),
    Mask("sliding window", "mask causal and window_left(70)"),
    Mask("window to both sides", "mask window(45)"),
    Mask("prefix LM", "mask causal or prefix(length[b])", tensors=("length",)),
    Mask("chunks", "mask causal and chunked(50)"),
    Mask("documents", "mask causal and same_document(doc)", tensors=("doc",)),
    Mask("padding", "mask j < length[b]", tensors=("length",)),
    Mask("valid keys", "mask valid[b, j]", tensors=("valid",)),
    Mask("StreamingLLM", "mask causal and sink_window(20, 60)"),
    Mask("Longformer", "mask window(40) or global_tokens(25)"),
    Mask("dilated", "mask causal and dilated(60, 4)"),
    Mask("strided", "mask causal and strided(30)"),
    Mask("fixed", "mask causal and fixed(64, 8)"),
    Mask("neighborhood", "mask neighborhood_2d(18, 18, 3)", loose=_JOINT),
    Mask("butterfly", "layout block 32: I == J or popcount(I ^ J) == 1 or I == 0 or J == 0", loose=_BLOCKS),
    Mask("random blocks", "layout block 32: I == J or random_blocks(0.1, 5)", loose=_BLOCKS),
    Mask("BigBird", "layout block 32: local_global(1, 1) or random_blocks(0.1, 5)", loose=_BLOCKS),
    Mask("block tensor", "layout block 32: blocks[h, I, J]", ("blocks",), _BLOCKS),
    # Unions.
    Mask("sink and window", "mask j < 13 or abs(i - j) < 37"),
    Mask("prefix and causal", "mask causal or prefix(50)"),
    Mask("prefix that sees itself", "mask causal or (i < 50 and j < 50)"),
    Mask("two windows", "mask causal and (i - j < 30 or (90 <= i - j and i - j < 120))"),
    Mask("two windows that abut", "mask causal and (i - j < 30 or (30 <= i - j and i - j < 75))"),
    Mask("two windows that overlap", "mask causal and (i - j < 60 or (40 <= i - j and i - j < 95))"),
    Mask("three windows", "mask abs(i - j) < 9 or abs(i - j - 60) < 9 or abs(i - j + 70) < 9"),
    Mask("sink, window, and a band", "mask causal and (j < 20 or i - j < 33 or (80 <= j and j < 101))"),
    Mask("shared prefix", "mask causal and (j < 40 or same_document(doc))", tensors=("doc",), loose=_ROWS),
    Mask("shared prefix of a run-time length", "mask j < length[b] or (causal and same_document(doc))",
         tensors=("doc", "length"), loose=_ROWS),
    Mask("prefix and window", "mask causal and (prefix(length[b]) or window_left(48))", tensors=("length",)),
    Mask("prefix, window and causal tail", "mask j < 30 or abs(i - j) < 25 or (causal and i >= 200)"),
    Mask("halves that meet", "mask j < 100 or j >= 100 - i"),
    Mask("all but a band", "mask not (60 <= i - j and i - j < 90)"),
    Mask("all but a square", "mask not (50 <= i and i < 130 and 40 <= j and j < 150)"),
    # Intersections.
    Mask("documents in a window", "mask causal and window_left(80) and same_document(doc)", tensors=("doc",)),
    Mask("chunks in a window", "mask chunked(64) and window(20)"),
    Mask("lower right in a window", "mask causal_lower_right and i - j + Nk - Nq < 90"),
    Mask("padding and causal", "mask causal and j < length[b]", tensors=("length",)),
    Mask("a box", "mask 30 <= i and i < 150 and 60 <= j and j < 190"),
    Mask("a diamond", "mask abs(i - 120) + abs(j - 110) < 70"),
    Mask("a diamond's outside", "mask abs(i - 120) + abs(j - 110) >= 70"),
    Mask("a wedge", "mask j <= i and i <= 2 * j"),
    # Shapes of rows.
    Mask("anticausal", "mask j >= i"),
    Mask("antidiagonal", "mask i + j < 220"),
    Mask("antidiagonal band", "mask abs(i + j - 200) < 30"),
    Mask("not causal", "mask not causal"),
    Mask("look ahead", "mask j <= i + 17"),
    Mask("two queries a key", "mask 2 * j <= i + 60"),
    Mask("stretched causal", "mask j * Nq <= i * Nk"),
    Mask("stretched window", "mask abs(3 * i - 4 * j) < 150"),
    Mask("block causal", "mask j // 24 <= i // 24"),
    Mask("block causal with a window", "mask j // 24 <= i // 24 and i // 24 - j // 24 < 3"),
    Mask("causal blocks of keys", "mask j // 40 < (i + 1) // 40 or i // 40 == j // 40", loose=_FORMS),
    Mask("window in whole blocks", "mask causal and j >= (i // 32) * 32 - 32"),
    Mask("chunks that look back", "mask causal and i // 50 - j // 50 <= 1"),
    Mask("chunks of a param", "mask causal and chunked(c)", params={"c": 50}),
    Mask("chunks of a param, lower right", "mask causal_lower_right and (i + Nk - Nq) // c == j // c",
         params={"c": 70}),
    Mask("chunks of a param that look back", "mask causal and i // c - j // c <= 1", params={"c": 50}),
    Mask("chunks of a param beside the second", "mask abs(i // c - j // c) <= 1 and j // c == 1", params={"c": 40}),
    Mask("chunks of a param, every third key", "mask causal and i // c == j // c and j % 3 == 1", params={"c": 60}),
    Mask("chunks that fall", "mask causal and chunked(c)", params={"c": -50}),
    Mask("one chunk", "mask causal and chunked(c)", params={"c": 0}),
    Mask("local blocks", "layout block 32: abs(I - J) <= 1"),
    Mask("local and global blocks", "layout block 32: local_global(1, 1)"),
    Mask("causal blocks", "layout block 48: J <= I"),
    Mask("causal in local blocks", "mask causal\n    layout block 48: I - J <= 2"),
    Mask("window by the row", "mask j >= first[i] and j < limit[i]", tensors=("first", "limit"), loose=_ROWS),
    Mask("end by the row", "mask j < limit[i]", tensors=("limit",)),
    Mask("clamped window", "mask abs(clamp(i, 40, 200) - j) <= 40"),
    Mask("window by maximum", "mask max(i - j, j - i) < 33"),
    Mask("choice of windows", "mask abs(i - j) < (20 if i < 130 else 60)"),
    Mask("exclusive or", "mask (j < 90) != (i < 70)"),
    Mask("rows that see all", "mask i % 7 == 0 or causal"),
    Mask("nothing", "mask i - j > 2 and i - j < 1"),
    Mask("everything", "mask i - j > 2 or i - j < 5"),
    Mask("later by time", "mask time[b, j] <= 0.0 or causal", tensors=("time",)),
    # Patterns.
    Mask("every third key", "mask j % 3 == 1"),
    Mask("every third difference", "mask (i - j) % 3 == 1 and abs(i - j) < 50"),
    Mask("stripes", "mask (j // 10) % 2 == 0"),
    Mask("checkered", "mask (i // 32 + j // 32) % 2 == 0"),
    Mask("bits", "mask (i & j) == 0", loose=_BITS),
    Mask("documents in any order", "mask causal and same_document(shuffled)", ("shuffled",), loose=_IDS),
)  # fmt: skip
