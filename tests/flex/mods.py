"""Mods as people write them: each makes a score_mod, a mask_mod and the tensors that learn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashgen.flex import and_masks, or_masks

B, H, NQ, NK, D = 2, 4, 24, 24, 8
Mods = tuple[Any, Any, tuple[Tensor, ...]]
WINDOW = 7


def learned(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def alibi() -> Mods:
    def generate_alibi_bias(count: int) -> Any:
        def alibi_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            scale = torch.exp2(-((h + 1) * 8.0 / count))
            bias = (kv_idx - q_idx) * scale
            return score + bias

        return alibi_mod

    return generate_alibi_bias(H), causal, ()


def alibi_slopes() -> Mods:
    slopes = learned(H)
    return lambda score, b, h, q, kv: score + slopes.exp()[h] * (kv - q), causal, (slopes,)


def softcap() -> Mods:
    soft_cap = 5

    def tanh_softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return soft_cap * torch.tanh(score / soft_cap)

    return tanh_softcap, causal, ()


def documents() -> Mods:
    offsets = torch.tensor([0, 5, 6, 15, NQ])
    counts = offsets[1:] - offsets[:-1]
    document_id = torch.repeat_interleave(torch.arange(len(counts)), counts)

    def doc_mask(inner: Any) -> Any:
        def doc_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            same_doc = document_id[q_idx] == document_id[kv_idx]
            q_logical = q_idx - offsets[document_id[q_idx]]
            kv_logical = kv_idx - offsets[document_id[kv_idx]]
            return same_doc & inner(b, h, q_logical, kv_logical)

        return doc_mask_mod

    return None, doc_mask(causal), ()


def prefix_lm() -> Mods:
    prefix_length = torch.tensor([3, 9], dtype=torch.int32)

    def prefix_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= prefix_length[b]

    return None, or_masks(prefix_mask, causal), ()


def dilated() -> Mods:
    def dilated_sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        diff = torch.abs(q_idx - kv_idx)
        return torch.logical_and(diff <= 8, diff % 2 == 0)

    return None, dilated_sliding_window, ()


def natten() -> Mods:
    width, kernel = 6, 3

    def get_x_y(idx: Any) -> Any:
        return idx // width, idx % width

    def natten_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        center_x = q_x.clamp(kernel // 2, (NQ // width - 1) - kernel // 2)
        center_y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
        return ((center_x - kv_x).abs() <= kernel // 2) & ((center_y - kv_y).abs() <= kernel // 2)

    return None, natten_mask, ()


class Relative(nn.Module):
    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.bias = nn.Parameter(learned(H, 2 * reach + 1, seed=1).detach())

    def distance(self, q: Any, kv: Any) -> Any:
        return torch.clamp(q - kv, -self.reach, self.reach) + self.reach

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.bias[h][self.distance(q_idx, kv_idx)]


def relative_table() -> Mods:
    module = Relative(5)
    return module.score_mod, None, (module.bias,)


def relative_from_the_end() -> Mods:
    """Negative indices count from the end, as the ones of keys after the query do here."""
    table = learned(2 * NQ, H, seed=2)
    return lambda score, b, h, q, kv: score + table.T[h, q - kv] + table[-1, 0], None, (table,)


def transposed_and_nested() -> Mods:
    table = learned(NK, NQ, seed=3)

    def outer(weight: float) -> Any:
        transposed = table.t()

        def middle(sign: int) -> Any:
            return lambda score, b, h, q, kv: score + sign * weight * transposed[q][kv]

        return middle(-1)

    return outer(0.25), None, (table,)


def of_another_mod() -> Mods:
    gate = learned(B, H, seed=4)

    def first(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * torch.sigmoid(gate[b, h])

    def second(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return first(score, b, h, q, kv) - math.log(2.0)

    return second, and_masks(causal, lambda b, h, q, kv: (q + kv) % 3 != 1), (gate,)


def sliding_window() -> Mods:
    def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= WINDOW

    return None, and_masks(sliding, causal), ()


def sinks_by_score() -> Mods:
    temperature, sink = learned(seed=5), learned(H, seed=6)

    def sinks(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = torch.where(kv < 2, score + sink[h], score * temperature)
        return torch.where(q >= kv, score, -float("inf"))

    return sinks, None, (temperature, sink)


def t5_buckets() -> Mods:
    table = learned(16, H, seed=7)

    def bucket(relative: Any, count: int = 16, most: int = 20) -> Any:
        count //= 2
        result = (relative > 0).to(torch.long) * count
        relative = torch.abs(relative)
        exact = count // 2
        large = exact + (torch.log(relative.float() / exact) / math.log(most / exact) * (count - exact)).to(torch.long)
        large = torch.min(large, torch.full_like(large, count - 1))
        return result + torch.where(relative < exact, relative, large)

    return lambda score, b, h, q, kv: score + table[bucket(kv - q), h], None, (table,)


def distance_decay() -> Mods:
    rates = learned(H, seed=8)

    def decay(rate: Tensor, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).abs().to(score.dtype)
        return score - torch.nn.functional.softplus(rate[h]) * torch.log1p(distance)

    return functools.partial(decay, rates), causal, (rates,)


def quantised_scale() -> Mods:
    kv_scale = torch.rand(B, H, NK, dtype=torch.float64) + 0.5
    codes = torch.randint(-8, 8, (NK,), dtype=torch.int8)

    def dequantise(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (score * kv_scale[b, h, kv] + codes[kv].float() / 16).float()

    return dequantise, None, ()


def padding() -> Mods:
    lengths = torch.tensor([11, NK])
    return None, lambda b, h, q, kv: (kv < lengths[b]) & (q < lengths[b]), ()


def tree() -> Mods:
    ancestors = torch.rand(NQ, NQ, generator=torch.Generator().manual_seed(9)) < 0.3
    ancestors |= torch.eye(NQ, dtype=torch.bool)
    return None, lambda b, h, q, kv: ancestors[q, kv], ()


def jagged() -> Mods:
    starts = torch.tensor([0, 4, 13, 20, 64])

    def segment(x: Any) -> Any:
        return (x >= starts[1]).int() + (x >= starts[2]).int() + (x >= starts[3])

    def within(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score += 0.5 * (segment(q) - segment(kv))
        return score

    return within, lambda b, h, q, kv: segment(q) == segment(kv), ()


MODS: dict[str, Callable[[], Mods]] = {
    each.__name__: each
    for each in (
        alibi, alibi_slopes, softcap, documents, prefix_lm, dilated, natten, relative_table, relative_from_the_end,
        transposed_and_nested, of_another_mod, sliding_window, sinks_by_score, t5_buckets, distance_decay,
        quantised_scale, padding, tree, jagged,
    )
}  # fmt: skip
