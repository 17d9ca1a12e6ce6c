"""What the rows of ``gpu_variants`` read, and what other libraries make of them.

In: a ``Row``. Out: tensors, and calls of FlexAttention and of PyTorch's own kernels. bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tools.benchmarks.gpu_rows import SIDE, WINDOW, Row

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def captured(row: Row) -> dict[str, Tensor]:
    """The tensors that a row's op reads; those that it learns ask for a gradient."""
    generator = torch.Generator("cuda").manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    return learned(row, generator) or masking(row, uniform)


def learned(row: Row, generator: torch.Generator) -> dict[str, Tensor]:
    """Those that ask for a gradient."""
    b, h, n = row.batch, row.heads, row.length

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_()

    match row.name:
        case "T5":
            return {"table": normal(32, h)}
        case "KERPLE":
            return {name: normal(h).detach().abs().requires_grad_() for name in ("amount", "rate")}
        case "ALiBi, learned slopes":
            return {"slope": (2.0 ** (-8.0 * torch.arange(1, h + 1, device="cuda") / h)).requires_grad_()}
        case "table of distances":
            return {"table": normal(h, 129)}
        case "bias [H, Nq, Nk]":
            return {"bias": normal(h, n, n, dtype=torch.bfloat16)}
        case "bias [B, H, Nq, Nk]":
            return {"bias": normal(b, h, n, n, dtype=torch.bfloat16)}
        case "sink, window 128":
            return {"sink": normal(h)}
    return {}


def masking(row: Row, uniform: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Those that a mask reads."""
    b, h, n = row.batch, row.heads, row.length
    match row.name:
        case "prefix":
            return {"length": (uniform(b) * n / 2).int()}
        case "padding":
            lengths = n // 4 + uniform(b) * (n - n // 4)
            return {"valid": torch.arange(n, device="cuda") < lengths[:, None]}
        case "documents":
            return {"doc": (uniform(b, n) < 32 / n).cumsum(1).int()}
        case "block tensor, 1/8":
            keep = uniform(h, n // SIDE, n // SIDE) < 1 / 8
            return {"keep": keep | torch.eye(n // SIDE, dtype=torch.bool, device="cuda")}
    return {}


def flex_score(row: Row, of: Mapping[str, Tensor]) -> Callable[..., Tensor] | None:
    """A row's score as FlexAttention takes it."""
    if row.name.startswith("soft-cap"):
        cap = float(row.name.split()[1].rstrip(","))
        return lambda s, _b, _h, _i, _j: cap * torch.tanh(s / cap)
    match row.name:
        case "bias [H, Nq, Nk]":
            return lambda s, _b, h, i, j: s + of["bias"][h, i, j]
        case "bias [B, H, Nq, Nk]":
            return lambda s, b, h, i, j: s + of["bias"][b, h, i, j]
    return None


def flex_mask(row: Row, of: Mapping[str, Tensor]) -> Callable[..., Tensor] | None:
    """A row's mask as FlexAttention takes it."""

    def causal(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    window = WINDOW if "window" in row.name and "soft-cap" in row.name else 128 if "window" in row.name else 0
    if window:
        return lambda _b, _h, i, j: (i >= j) & (i - j < window)
    match row.name:
        case "prefix":
            return lambda b, _h, i, j: (i >= j) | (j < of["length"][b])
        case "padding":
            return lambda b, _h, _i, j: of["valid"][b, j]
        case "documents":
            return lambda b, _h, i, j: (i >= j) & (of["doc"][b, i] == of["doc"][b, j])
        case "block tensor, 1/8":
            return lambda _b, h, i, j: of["keep"][h, i // SIDE, j // SIDE]
        case "neighbourhoods 56 × 56":

            def near(at: Tensor, other: Tensor) -> Tensor:
                first = torch.clamp(at - 3, 0, 56 - 7)
                return (other >= first) & (other < first + 7)

            return lambda _b, _h, i, j: near(i // 56, j // 56) & near(i % 56, j % 56)
    return causal


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False) if DEVICE == "cuda" else flex_attention


def flex(row: Row, of: Mapping[str, Tensor], options: Mapping[str, Any] | None = None) -> Attention:
    """FlexAttention, compiled where there is a GPU; its block mask is made outside the time."""
    keep = flex_mask(row, of)
    by_batch = row.batch if row.name in ("prefix", "padding", "documents") else None
    by_head = row.heads if row.name.startswith("block") else None
    length, is_compiled = row.length, DEVICE == "cuda"
    mask = create_block_mask(keep, by_batch, by_head, length, length, device=DEVICE, _compile=is_compiled)  # type: ignore[arg-type]
    score, compiled = flex_score(row, of), _compiled_flex()
    if row.name == "squared distances":

        def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            of_q, of_k = ((x.float() ** 2).sum(-1) / 2 for x in (q, k))
            return compiled(  # type: ignore[no-any-return]
                q, k, v, lambda s, b, h, i, j: s - of_q[b, h, i] - of_k[b, h, j], block_mask=mask, scale=1.0
            )

        return distances
    if row.name == "sink, window 128":

        def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o, lse = compiled(q, k, v, block_mask=mask, return_lse=True)
            return (o * torch.sigmoid(lse - of["sink"][:, None]).unsqueeze(-1)).to(o.dtype)  # type: ignore[no-any-return]

        return with_sink
    more = {"enable_gqa": grouped(row), "kernel_options": options}
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask, **more)


def grouped(row: Row) -> bool:
    """Whether several heads share keys and values."""
    return row.kv_heads not in (0, row.heads)


def sigmoid_formula(row: Row) -> Attention:
    """Sigmoid weights as PyTorch has them, compiled: no library's kernel does, FlexAttention has a softmax alone."""

    @torch.compile(dynamic=False)
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(row.length, device="cuda")
        weights = torch.sigmoid((q @ k.transpose(-1, -2)).float() / row.head_dims[0] ** 0.5 - math.log(row.length))
        return weights.masked_fill(i[:, None] < i, 0.0).to(v.dtype) @ v

    return attention


def sdpa(row: Row, backend: SDPBackend | None) -> Attention:
    """PyTorch's own kernels: of one backend, or of the one that it chooses."""
    settings: dict[str, Any] = {"is_causal": "causal" in row.body, "dropout_p": 0.1 if "dropout" in row.body else 0.0}
    if grouped(row):
        settings["enable_gqa"] = True

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return scaled_dot_product_attention(q, k, v, **settings)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **settings)

    return attention


def flash4(row: Row) -> Attention:
    """FlashAttention-4 (the wheel `flash-attn-4`); its kernels for Hopper are FlashAttention-3's in CuTe's DSL."""
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal="causal" in row.body)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)  # type: ignore[no-any-return]

    return attention


def inputs(row: Row) -> list[Tensor]:
    """q, k, v and dO."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    made = []
    for shape in row.shapes:
        x = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(generator=generator)
        made.append(x / row.head_dims[0] ** 0.25 if row.name in ("T5", "squared distances") else x)
    return made
