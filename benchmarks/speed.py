"""Speed beside PyTorch's scaled_dot_product_attention and compiled FlexAttention, all in one process, taking turns.

FlexAttention has no backward on a CPU; SDPA has no soft-capping. What a peer cannot do is marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from benchmarks.report import publish
from flashgen.benchmark.timing import Times, paired_times

ROOT = Path(__file__).resolve().parent.parent

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype


SETTINGS = (
    Setting(8, 1024, 64, torch.float32),
    Setting(8, 4096, 64, torch.float32),
    Setting(8, 4096, 128, torch.float32),
    Setting(8, 4096, 64, torch.bfloat16),
)


def main() -> None:
    """Measure and publish."""
    causal = flashgen.load(ROOT / "specs" / "causal.attn")
    full = flashgen.loads("attention full { head_dim 64, 128 }")
    rows = [
        measure(setting, op, is_causal=is_causal, backward=backward)
        for setting in SETTINGS
        for is_causal, op in ((False, full), (True, causal))
        for backward in (False, True)
    ]
    publish(
        "speed",
        "make bench",
        ["B,H,N,D", "dtype", "mask", "pass", "flashgen GFLOP/s", "SDPA GFLOP/s", "Flex GFLOP/s", "SDPA/flashgen time"],
        rows,
        "Medians of rounds in which all take turns; the ratio is taken within a round, with its quartiles. "
        "FLOPs: 4·B·H·N²·D forward, 2.5 times that backward, half of both when causal.",
    )


def measure(setting: Setting, op: Attention, *, is_causal: bool, backward: bool) -> list[str]:
    """One row."""
    q, k, v = (torch.randn(1, setting.heads, setting.length, setting.head_dim, dtype=setting.dtype) for _ in range(3))
    candidates: dict[str, Attention] = {
        "flashgen": op,
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal),
    }
    if not backward:
        candidates["flex"] = flex(setting.length, is_causal=is_causal)
    calls = {name: run(attention, q, k, v, backward=backward) for name, attention in candidates.items()}
    times = {entry.name: entry for entry in paired_times(calls, rounds=11, budget=60.0)}
    flops = 4.0 * setting.heads * setting.length**2 * setting.head_dim
    flops *= (3.5 if backward else 1.0) * (0.5 if is_causal else 1.0)
    ratio = times["sdpa"].ratio
    return [
        f"1,{setting.heads},{setting.length},{setting.head_dim}",
        str(setting.dtype).removeprefix("torch."),
        "causal" if is_causal else "none",
        "forward+backward" if backward else "forward",
        rate(times["flashgen"], flops),
        rate(times["sdpa"], flops),
        rate(times["flex"], flops) if "flex" in times else "has none",
        f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
    ]


def flex(length: int, *, is_causal: bool) -> Attention:
    """FlexAttention, compiled; its block mask is made outside the time."""
    torch.compiler.reset()
    mask = None
    if is_causal:
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = compiled(q, k, v, block_mask=mask)
        assert isinstance(o, Tensor)
        return o

    return attention


def run(attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Callable[[], object]:
    """One pass as a function without arguments."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    d_o = torch.randn_like(q)
    return lambda: torch.autograd.grad(attention(*leaves), leaves, d_o)


def rate(times: Times, flops: float) -> str:
    """GFLOP/s of the median."""
    return f"{flops / times.seconds.median / 1e9:.0f}"


if __name__ == "__main__":
    main()
