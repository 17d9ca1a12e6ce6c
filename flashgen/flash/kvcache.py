"""``flash_attn_with_kvcache``: the last queries of each sequence over a cache of keys and values.

In: FlashAttention's arguments, tensors [B, N, H, D] and pages [pages, page, Hkv, D]. The op of the same ``Layer`` as
for batches of one length runs here, through its ``decode``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashgen.flash.dense import check_of_heads, layer_of
from flashgen.runtime.appending import append
from flashgen.runtime.cached import cache_of
from flashgen.runtime.conversion import as_number


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
) -> Any:
    """Attention over a cache: ``q`` [B, Nq, H, D] → ``o`` [B, Nq, H, Dv]; with ``return_softmax_lse`` ``(o, lse)``.

    ``k_cache`` is [B, Nmax, Hkv, D], ``v_cache`` [B, Nmax, Hkv, Dv]; with ``block_table`` int32 [B, P] they are pages
    of any size, [pages, page, Hkv, D]. ``cache_seqlens``, int32 [B] or one number, are the rows that are filled, by
    default all. ``k`` [B, new, Hkv, D] and ``v`` are written behind them first. ``cache_batch_idx`` int32 [B] says
    which entries of a larger cache are meant; rows before ``cache_leftpad`` int32 [B] are not seen. ``lse`` is
    [B, H, Nq], float32, −inf for a row without a key, whose o is 0. All other options mean what they mean for
    ``flash_attn_func``: the last query stands at the last row.

    ``rotary_cos`` and ``rotary_sin``, [Nmax or more, R / 2], rotate the first R ≤ D features of q and of the new k,
    neighbours as pairs (``rotary_interleaved``) or halves. New keys are rotated by the rows that they are written to.
    Queries are rotated by the same rows where ``causal`` or a window counts positions; else all as the first new row.

    A cache of ``torch.float8_e4m3fn`` is multiplied by ``k_descale`` and ``v_descale``, float32 [B, Hkv] or one number;
    k and v, of the type of q, are written to it divided by these.

    On a GPU the host waits for ``cache_seqlens`` where fewer rows are new than there are queries, and these are two or
    more: a sequence may be shorter than they are. There are no gradients. Raises ``ValueError`` and ``TypeError`` by
    name for arguments that do not fit.
    """
    _check(q, k_cache, v_cache, k, v)
    (batch, queries, heads, _), new = q.shape, 0 if k is None else k.shape[1]
    check_of_heads(alibi_slopes, s_aux, batch, heads)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("'cache_seqlens' is missing: it says behind which rows k and v are written")
        if block_table is not None and not isinstance(block_table, Tensor):
            raise TypeError(f"'block_table' must be a tensor (i32[B, P]), not {type(block_table).__name__}")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    k_rows, v_rows = (None if x is None else x.transpose(1, 2) for x in (k, v))
    layer, captured = layer_of(
        (q, v_cache, batch), 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_softmax_lse
    )
    if rotary_cos is not None or rotary_sin is not None:
        counts = layer.mask != "true"
        angles = _angles(q, k, k_cache, rotary_cos, rotary_sin, cache_seqlens, block_table)
        q = _rotated(q, angles(queries if counts else 1), rotary_interleaved)
        assert k is not None, "refused otherwise"
        k_rows = _rotated(k, angles(new), rotary_interleaved).transpose(1, 2)
    cached = (q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    places: dict[str, Any] = {
        "block_table": block_table, "cache_batch_idx": cache_batch_idx, "leftpad": cache_leftpad,
        "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    if batch > 0 and _has_short_sequences(cache_seqlens, new, queries):
        cache = cache_of(*cached, cache_seqlens, **places).in_numbers()
        if k_rows is not None and v_rows is not None:
            cache = append(cache, cached[1], cached[2], k_rows, v_rows)
        parts = [
            layer.op()(
                cached[0][b : b + 1],
                *(x.to(q.dtype) for x in cache.sequence(cached[1], cached[2], b, length, padding)),
                return_lse=True,
                **{name: x[b : b + 1] if name == "slopes" else x for name, x in captured.items()},
            )
            for b, (length, padding) in enumerate(cache.check(cached[1], 0))
        ]
        o, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    else:
        o, lse = layer.op().decode(
            *cached, cache_seqlens, k=k_rows, v=v_rows, num_splits=num_splits, return_lse=True, **places, **captured
        )
    return (o.transpose(1, 2), lse) if return_softmax_lse else o.transpose(1, 2)


def _has_short_sequences(cache_seqlens: object, new: int, queries: int) -> bool:
    """Whether one has fewer rows than queries, which no cache means: such calls go by dense calls of each sequence.

    A graph that is compiled cannot branch on it: ``decode`` names the sequence when it runs.
    """
    if new >= queries or torch.compiler.is_compiling():
        return False
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.is_cuda and queries == 1:  # a sequence without a row keeps nothing, which kernels see
            return False
        return not cache_seqlens.is_meta and bool((cache_seqlens + new < queries).any())
    length = as_number(cache_seqlens, whole=True)
    return length is not None and length + new < queries


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    """Raise where tensors do not fit, in terms of FlashAttention's layout; the rest is checked by the op."""
    if (k is None) != (v is None):
        raise ValueError("k and v are written to the cache together: pass both, or neither")
    forms = {
        "q": (q, "[B, Nq, H, D]"),
        "k_cache": (k_cache, "[B, Nmax, Hkv, D] or, with 'block_table', [pages, page, Hkv, D]"),
        "v_cache": (v_cache, "[B, Nmax, Hkv, Dv] or, with 'block_table', [pages, page, Hkv, Dv]"),
    }
    if k is not None and v is not None:
        forms |= {"k": (k, "[B, new, Hkv, D]"), "v": (v, "[B, new, Hkv, Dv]")}
    for name, (x, form) in forms.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor {form}, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")
    (batch, _, heads, width), (_, _, kv_heads, v_width) = q.shape, v_cache.shape
    if k_cache.shape[3] != width or tuple(v_cache.shape[:3]) != tuple(k_cache.shape[:3]):
        shapes = ", ".join(f"{name} {list(forms[name][0].shape)}" for name in ("q", "k_cache", "v_cache"))
        raise ValueError(f"{shapes}: expected q [B, Nq, H, D], k_cache [B, Nmax, Hkv, D], v_cache [B, Nmax, Hkv, Dv]")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"'q' has {heads} heads and 'k_cache' has {kv_heads}; H must be a multiple of Hkv")
    if k is None or v is None:
        return
    for name, x, last in (("k", k, width), ("v", v, v_width)):
        if tuple(x.shape) != (batch, k.shape[1], kv_heads, last):
            wanted = [batch, k.shape[1], kv_heads, last]
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {wanted} is expected, rows for the cache")


def _angles(
    q: Tensor,
    k: Tensor | None,
    k_cache: Tensor,
    rotary_cos: object,
    rotary_sin: object,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None,
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What gives cos and sin, float32 [B, rows, 1, R / 2], of so many rows of each sequence, from its length on."""
    if k is None:
        raise ValueError("'rotary_cos' and 'rotary_sin' rotate what is new: pass k and v, or leave them out")
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    width = q.shape[3]
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor [Nmax, R / 2], not {type(x).__name__}; pass both, or neither")
        if x.dim() != 2 or x.shape[0] < capacity or not 0 < 2 * x.shape[1] <= width:
            raise ValueError(
                f"'{name}' has shape {list(x.shape)}; [Nmax, R / 2] is expected, of {capacity} or more rows and at "
                f"most {width // 2} columns"
            )
        if x.dtype is not q.dtype or x.device != q.device:
            raise TypeError(f"'{name}' is {x.dtype} on {x.device}; q is {q.dtype} on {q.device}")
    assert isinstance(rotary_cos, Tensor)
    assert isinstance(rotary_sin, Tensor)
    if rotary_cos.shape != rotary_sin.shape:
        raise ValueError(
            f"'rotary_cos' has shape {list(rotary_cos.shape)} and 'rotary_sin' {list(rotary_sin.shape)}; they differ"
        )
    cos, sin = rotary_cos.float(), rotary_sin.float()
    first = torch.as_tensor(cache_seqlens, device=q.device).long().expand(q.shape[0])

    def of(rows: int) -> tuple[Tensor, Tensor]:
        # What lies outside of the cache is named by the op.
        at = (first[:, None] + torch.arange(rows, device=q.device)).clamp(0, max(0, cos.shape[0] - 1))
        return cos[at][:, :, None], sin[at][:, :, None]

    return of


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x [B, N, H, D] with its first features rotated, computed in float32."""
    cos, sin = angles
    count = 2 * cos.shape[-1]
    first, rest = x[..., :count].float(), x[..., count:]
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    rows = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rows.to(x.dtype), rest), -1)
