"""The rows of ``gpu_variants``: specs beside causal attention and what other libraries make of them, with goals.

In: nothing. Out: tuples of ``Row``. A row is 16k tokens in all of 2048 channels, unless its sizes say otherwise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

Goals = tuple[float, float]  # at least so many times as fast, forward and forward with backward

LIKE_CAUSAL: Goals = (0.8, 0.75)  # soft-caps
LEARNED: Goals = (0.75, 0.6)  # scores by distance, with gradients
FLEX: Goals = (1.5, 1.5)
ANY: Goals = (1.4, 1.4)
CUDNN: Goals = (1.0, 1.0)

# The wheel `flash-attn-4`; `flash-attn` has the same package without this folder.
FLASH4_AT_HAND = bool(importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"))


@dataclass(frozen=True)
class Row:
    """One row of a table. ``goals``: by what it is compared with."""

    name: str
    body: str
    head_dims: tuple[int, int]
    length: int
    batch: int
    heads: int
    kv_heads: int = 0
    goals: Mapping[str, Goals] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """The text of its op."""
        d, dv = self.head_dims
        dims = f"{d}" if d == dv else f"{d}/{dv}"
        return f"attention bench_row {{ head_dim {dims}  dtype bf16  {self.body} }}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dO."""
        (d, dv), b, n, hkv = self.head_dims, self.batch, self.length, self.kv_heads or self.heads
        return (b, self.heads, n, d), (b, hkv, n, d), (b, hkv, n, dv), (b, self.heads, n, dv)

    @property
    def size(self) -> str:
        """As a table has it."""
        (d, dv), hkv = self.head_dims, self.kv_heads or self.heads
        heads = f"{self.heads}/{hkv}" if hkv != self.heads else f"{self.heads}"
        return f"{self.batch}×{heads}×{self.length}×{d}" + (f"/{dv}" if d != dv else "")

    def causal_pairs(self, window: int | None = None) -> float:
        """Pairs of a head that a causal window keeps."""
        n, w = self.length, min(window or self.length, self.length)
        return w * (w + 1) / 2 + (n - w) * w


def _row(name: str, body: str, d: int, n: int, goals: Mapping[str, Goals], **sizes: int) -> Row:
    heads = sizes.pop("heads", 2048 // d)
    return Row(name, body, (d, d), n, sizes.pop("batch", max(16384 // n, 1)), heads, goals=goals)


WINDOW = 4096
_CAPPED = {"causal": LIKE_CAUSAL, "flex": FLEX}
SOFTCAP = tuple(
    _row(f"soft-cap {cap}{name}", f"score softcap(s, {cap}.0)  mask {mask}", d, 8192, _CAPPED)
    for d in (128, 256)
    for name, mask in ((", causal", "causal"), (", window", f"causal and window_left({WINDOW})"))
    for cap in (50, 30)
)  # fmt: skip

_T5 = (
    "scale 1  tensor table: f32[32, H] grad  "
    "let n = max(i - j, 0)  let far = 16 + int(log(n / 16) / log(128 / 16) * 16)  "
    "score s + table[n if n < 16 else min(far, 31), h]  mask causal"
)
_BY_DISTANCE = {
    "T5": _T5,
    "KERPLE": "tensor amount: f32[H] grad  tensor rate: f32[H] grad  "
    "score s - amount[h] * log1p(rate[h] * max(i - j, 0))  mask causal",
    "ALiBi, learned slopes": "tensor slope: f32[H] grad  score s - slope[h] * (i - j)  mask causal",
    "table of distances": "const reach = 128  tensor table: f32[H, reach + 1] grad  "
    "score s + table[h, clamp(i - j, 0, reach)]  mask causal",
}
BY_DISTANCE = tuple(
    _row(name, body, d, 8192, {"causal": LEARNED}) for d in (64, 128) for name, body in _BY_DISTANCE.items()
)

_SHARED_BIAS = "tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  mask causal"
_BIAS = "tensor bias: bf16[B, H, Nq, Nk] grad  score s + bias[b, h, i, j]  mask causal"
BIAS = tuple(
    _row(name, body, 128, n, {"bound": (1 / 1.4, 1 / 1.4), "flex": FLEX}, batch=batch)
    for n, batch in ((2048, 4), (4096, 2))
    for name, body in (("bias [H, Nq, Nk]", _SHARED_BIAS), ("bias [B, H, Nq, Nk]", _BIAS))
)

SIDE = 64
_SINK = "tensor sink: f32[H] grad  mask causal and window_left(128)  weights softmax(sink = sink[h])"
MASKS = (
    _row("sink, window 128", _SINK, 64, 8192, {"flex": ANY}),
    _row("prefix", "tensor length: i32[B]  mask causal or prefix(length[b])", 128, 8192, {"flex": ANY}),
    _row("padding", "tensor valid: bool[B, Nk]  mask valid[b, j]", 64, 512, {"flex": ANY}, batch=64, heads=16),
    _row("documents", "tensor doc: i32[B, Nk]  mask causal and same_document(doc)", 128, 32768, {"flex": ANY}),
    _row("neighbourhoods 56 × 56", "mask neighborhood_2d(56, 56, 3)", 64, 3136, {"flex": ANY}, batch=8),
    _row("block tensor, 1/8", f"tensor keep: bool[H, ceildiv(Nq, {SIDE}), ceildiv(Nk, {SIDE})]  "
         f"layout block {SIDE}: keep[h, I, J]", 64, 8192, {"flex": ANY}),
    _row("squared distances", "score -0.5 * sqdist  mask causal", 64, 4096, {"flex": ANY}),
    _row("sigmoid weights", "mask causal  weights sigmoid(s - log(Nk))", 64, 4096, {"formula": ANY}),
    _row("dropout 0.1", "mask causal  dropout 0.1", 64, 8192, {"flash": ANY}),
    _row("dropout 0.1", "mask causal  dropout 0.1", 128, 8192, {"flash": ANY}),
)  # fmt: skip


def _dense(d: int, dv: int, heads: int, kv_heads: int, n: int, mask: str) -> Row:
    heads = min(heads, 8) if n > 32768 else heads
    kv_heads = min(kv_heads, heads)
    name = mask or "plain"
    batch = max(16384 // n, 1)
    peers = {"cudnn": CUDNN, **({"flash 4": CUDNN} if FLASH4_AT_HAND else {})}
    return Row(name, f"mask {mask}" if mask else "", (d, dv), n, batch, heads, kv_heads, peers)


DENSE = tuple(
    _dense(*dims, n, mask)
    for n in (8192, 512, 1000, 4099, 2048, 32768, 131072)
    for dims in ((128, 128, 16, 16), (64, 64, 32, 32), (192, 128, 16, 16), (256, 256, 8, 8), (128, 128, 64, 8))
    for mask in ("causal", "")
)

SHORT = tuple(
    Row(mask or "plain", f"mask {mask}" if mask else "", (d, d), n, 1, heads, goals={"sdpa": (1.0, 1.0)})
    for n in (16, 128, 256, 512, 1024)
    for d, heads in ((64, 8), (128, 16))
    for mask in ("causal", "")
)

DOORS = tuple(
    Row("causal", "mask causal", (d, d), n, batch, heads, kv_heads)
    for batch, heads, kv_heads, n in ((1, 16, 4, 16384), (2, 16, 16, 8192), (1, 32, 8, 4096), (1, 32, 8, 1024))
    for d in (128, 64)
)
