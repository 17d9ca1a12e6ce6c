"""``flash_attn_with_kvcache``: the last queries of each sequence over a cache of keys and values.

In: FlashAttention's arguments, tensors [B, N, H, D] and pages [pages, page, Hkv, D]. The op of the same ``Layer`` as
for batches of one length runs here, through its ``decode``; of sequences with queries of any lengths, through its
``varlen``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from flashgen.flash.options import (
    CallSizes,
    CommonOptions,
    Positional,
    check_bool,
    check_names,
    check_rows,
    either,
    plan_call,
    sizes_of,
    with_second_query,
)
from flashgen.flash.rows import TYPES, Ragged, longest_argument, rows_of_cache, starts_argument
from flashgen.op.appending import append
from flashgen.op.cached import cache_of
from flashgen.op.conversion import as_number, is_integral, require
from flashgen.op.eight_bits import factors_of, from_8_bits, wide_type
from flashgen.op.signature import F8


class CachedByName(CommonOptions, total=False):
    """Options of caches beside ``CommonOptions``.

    ``page_table`` is FlashAttention 3's name of ``block_table``. ``rotary_seqlens`` int32 [B] are the positions of the
    first new rows as the rotary embedding counts, by default ``cache_seqlens``. With ``cu_seqlens_q`` int32 [B + 1]
    q is [Tq, H, D], sequences of any lengths one behind the other, of at most ``max_seqlen_q`` queries; o is
    [Tq, H, Dv], lse [H, Tq]. What they see of the cache is copied, and there are no new rows, so that
    ``cu_seqlens_k_new`` is refused.
    """

    page_table: Tensor | None
    rotary_seqlens: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_q: int | Tensor | None


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
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **by_name: Unpack[CachedByName],
) -> Any:
    """Attention over a cache: ``q`` [B, Nq, H, D] → ``o`` [B, Nq, H, Dv]; with ``return_softmax_lse`` ``(o, lse)``.

    ``k_cache`` is [B, Nmax, Hkv, D], ``v_cache`` [B, Nmax, Hkv, Dv]; with ``block_table`` int32 [B, P] they are pages
    of any size, [pages, page, Hkv, D]. ``cache_seqlens``, int32 [B] or one number, are the rows that are filled, by
    default all. ``k`` [B, new, Hkv, D] and ``v`` are written behind them first. ``cache_batch_idx`` int32 [B] says
    which entries of a larger cache, or rows of a larger table, are meant; rows before ``cache_leftpad`` int32 [B] are
    not seen. ``lse`` is [B, H, Nq], float32, −inf or the sink for a row without a key, whose o is 0. All other options
    mean what they mean for ``flash_attn_func``: the last query stands at the last row.

    ``rotary_cos`` and ``rotary_sin``, [Nmax or more, R / 2], rotate the first R ≤ D features of q and of the new k,
    neighbours as pairs (``rotary_interleaved``) or halves. New keys are rotated by the rows that they are written to.
    Queries are rotated by the same rows where ``causal`` or a window counts positions; else all as the first new row.

    A cache of ``torch.float8_e4m3fn`` is multiplied by ``k_descale`` and ``v_descale``, float32 [B, Hkv] or one number;
    k and v, of the type of q, are written to it divided by these, and k and v of 8 bits as they are. q of 8 bits goes
    with such a cache alone; o then is bfloat16.

    On a GPU the host waits for ``cache_seqlens`` where fewer rows are new than there are queries, and these are two or
    more: a sequence may be shorter than they are. There are no gradients. Raises ``ValueError`` and ``TypeError`` by
    name for arguments that do not fit.
    """
    given: Positional = (0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, False)
    check_bool("return_softmax_lse", return_softmax_lse)
    check_bool("rotary_interleaved", rotary_interleaved)
    places: dict[str, Any] = {"block_table": block_table, "cache_batch_idx": cache_batch_idx, "leftpad": cache_leftpad}
    if by_name:
        check_names("flash_attn_with_kvcache", by_name, CachedByName)
        block_table = either({**by_name, "block_table": block_table}, "block_table", "page_table")
        places |= {"block_table": block_table} | {name: by_name.get(name) for name in ("k_descale", "v_descale")}
    if block_table is not None and cache_batch_idx is not None:
        places |= {"block_table": _rows_of_table(block_table, cache_batch_idx), "cache_batch_idx": None}
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("'cache_seqlens' is missing: it says behind which rows k and v are written")
        cache_seqlens = _room(k_cache, block_table)
    if by_name.get("cu_seqlens_q") is not None:
        if any(x is not None for x in (k, v, rotary_cos, rotary_sin, by_name.get("cu_seqlens_k_new"))):
            raise ValueError("'cu_seqlens_q' goes with rows that a cache has: write k and v to it first, rotated")
        own: dict[str, Any] = {**by_name, "return_softmax_lse": return_softmax_lse, "num_splits": num_splits}
        return _of_ragged_queries(q, k_cache, v_cache, cache_seqlens, places, given, own)
    sizes = _sizes(q, k_cache, v_cache, k, v)
    second = by_name.get("qv")
    if second is not None:
        sizes = sizes._replace(width=sizes.width + sizes.v_width)
    counts_from = cache_leftpad if by_name.get("attention_chunk") else None
    asked = plan_call(sizes, given, by_name, counts_from)
    if rotary_cos is not None or rotary_sin is not None:
        positions = by_name.get("rotary_seqlens")
        first = cache_seqlens if positions is None else positions
        q, k = rotated(
            q, k, (rotary_cos, rotary_sin), (first, _room(k_cache, block_table)),
            is_interleaved=rotary_interleaved, moves=not asked.sees_all,
        )  # fmt: skip
    dtype = q.dtype
    if by_name.get("q_descale") is not None or dtype is F8:
        q = _of_more_bits(q, k_cache, by_name.get("q_descale"))
    if second is not None:
        cache_seqlens, k, v = _appended((q, k_cache, v_cache), (k, v), cache_seqlens, places)
        q, k_cache = with_second_query(q, k_cache, v_cache, second)
    rows = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    has_lse = return_softmax_lse or asked.has_lse
    if q.shape[0] and _has_short_sequences(cache_seqlens, 0 if k is None else k.shape[1], q.shape[1]):
        cache_seqlens, k, v = _appended((q, k_cache, v_cache), (k, v), cache_seqlens, places)
        (batch, count), device = q.shape[:2], q.device
        own = {name: x for name, x in by_name.items() if name not in ("qv", "q_descale")}
        own |= {"cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * count, "return_lse": True}
        o, lse = _of_ragged_queries(q.flatten(0, 1), k_cache, v_cache, cache_seqlens, places, given, own)
        o, lse = o.unflatten(0, (batch, count)).transpose(1, 2), lse.unflatten(1, (batch, count)).transpose(0, 1)
        found: Any = (o, lse) if has_lse else o
    else:
        new = {} if k is None or v is None else {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        found = asked.op.decode(
            *rows, cache_seqlens, num_splits=num_splits, return_lse=has_lse, **new, **places, **asked.captured
        )
    o, lse = found if has_lse else (found, None)
    o = (o if dtype is not F8 else o.bfloat16()).transpose(1, 2)
    return (o, lse) if has_lse else o


def _appended(
    rows: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    cache_seqlens: int | Tensor,
    places: Mapping[str, Any],
) -> tuple[int | Tensor, None, None]:
    """Write k and v, if given, to the cache; returns the new lengths of its sequences, and None for k and v."""
    k, v = new
    if k is None or v is None:
        return cache_seqlens, None, None
    q, k_cache, v_cache = (x.transpose(1, 2) for x in rows)
    cache = cache_of(q, k_cache, v_cache, cache_seqlens, **places)
    return append(cache, k_cache, v_cache, k.transpose(1, 2), v.transpose(1, 2)).lengths, None, None


def _of_ragged_queries(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor,
    places: Mapping[str, Any],
    given: Positional,
    by_name: Mapping[str, Any],
) -> Any:
    """The call for queries of any lengths, one behind the other."""
    check_rows(
        {"q": (q, "[Tq, H, D]"), "k_cache": (k_cache, _FORMS["k_cache"]), "v_cache": (v_cache, _FORMS["v_cache"])}
    )
    starts = starts_argument("cu_seqlens_q", by_name["cu_seqlens_q"])
    most = longest_argument("max_seqlen_q", by_name.get("max_seqlen_q"))
    k, v, k_starts = rows_of_cache(q, k_cache, v_cache, starts.shape[0] - 1, cache_seqlens, places)
    return Ragged(q, k, v, starts, k_starts, (most, None)).attend(given, by_name)


def _of_more_bits(q: Tensor, k_cache: Tensor, factor: Any) -> Tensor:
    """q of 8 bits, widened; the cache has 8 bits, too. Raises ``TypeError`` and ``ValueError``."""
    if q.dtype is F8 and k_cache.dtype is not F8:
        raise TypeError(f"'q' is {F8}, but 'k_cache' is {k_cache.dtype}; q of 8 bits goes with a cache of 8 bits")
    factors = factors_of("q_descale", factor, ("q", q), (q.shape[0], k_cache.shape[2]), q.device)
    return from_8_bits(q.transpose(1, 2), factors, wide_type(TYPES, q.device)).transpose(1, 2)


def _rows_of_table(table: Any, entries: Any) -> Tensor:
    """The rows of ``block_table`` for the sequences that ``cache_batch_idx`` names."""
    for name, x in (("block_table", table), ("cache_batch_idx", entries)):
        if not isinstance(x, Tensor) or not is_integral(x.dtype):
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"'{name}' must be a tensor of integers, not {what}")
    require(
        ((entries >= 0) & (entries < table.shape[0])).all(),
        f"'cache_batch_idx' names a row of 'block_table' that is none; it has {table.shape[0]}",
    )  # fmt: skip
    rows: Tensor = table[entries.long()]
    return rows


def _room(k_cache: Tensor, block_table: Any) -> int:
    """The most rows that a sequence may have."""
    check_rows({"k_cache": (k_cache, _FORMS["k_cache"])})
    if block_table is None:
        return int(k_cache.shape[1])
    check_rows({"block_table": (block_table, "[B, P]")})
    return int(k_cache.shape[1] * block_table.shape[1])


def _has_short_sequences(cache_seqlens: object, new: int, queries: int) -> bool:
    """Whether a sequence has fewer rows than queries. ``decode`` refuses such calls, which go by ragged calls instead.

    A compiled graph cannot branch on it: there, ``decode`` raises when the graph runs.
    """
    if new >= queries or torch.compiler.is_compiling():
        return False
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.is_meta or cache_seqlens.numel() == 0:
            return False
        if cache_seqlens.is_cuda and queries == 1:  # a sequence without a row keeps nothing, which kernels see
            return False
        return int(cache_seqlens.min()) + new < queries
    length = as_number(cache_seqlens, whole=True)
    return length is not None and length + new < queries


_FORMS = {
    "q": "[B, Nq, H, D]",
    "k_cache": "[B, Nmax, Hkv, D]",
    "v_cache": "[B, Nmax, Hkv, Dv]",
    "k": "[B, new, Hkv, D]",
    "v": "[B, new, Hkv, Dv]",
}


def _sizes(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> CallSizes:
    """The sizes of a call. Raises where tensors do not fit FlashAttention's layout; the op checks the rest."""
    if (k is None) != (v is None):
        raise ValueError("k and v are written to the cache together: pass both, or neither")
    rows = (q, k_cache, v_cache) if k is None else (q, k_cache, v_cache, k, v)
    sizes = sizes_of(_FORMS, *rows, pages=" or, with 'block_table', pages [pages, page, Hkv, D]")
    if k is not None and v is not None:
        for name, x, last in (("k", k, sizes.width), ("v", v, sizes.v_width)):
            wanted = [sizes.batch, k.shape[1], k_cache.shape[2], last]
            if list(x.shape) != wanted:
                raise ValueError(f"'{name}' has shape {list(x.shape)}; {wanted} is expected, rows for the cache")
    return sizes


# Rotary embedding -----------------------------------------------------------------------------------------------------


def rotated(
    q: Tensor,
    k: Tensor | None,
    angles: tuple[object, object],
    places: tuple[int | Tensor, int],
    *,
    is_interleaved: bool,
    moves: bool,
) -> tuple[Tensor, Tensor]:
    """q and k with their first features rotated by ``angles``: cos and sin [Nmax, R / 2].

    ``places``: the position of each sequence's first row, and the number of positions. ``moves``: each query has a
    position of its own; else all have the first. Raises ``TypeError`` and ``ValueError``.
    """
    first, capacity = places
    if k is None:
        raise ValueError("'rotary_cos' and 'rotary_sin' rotate what is new: pass k and v, or leave them out")
    cos, sin = _checked(q, k, angles, capacity)
    at = _positions(first, q)

    def by_rows(x: Tensor, rows: int) -> Tensor:
        # What lies outside of the cache is named by the op.
        places = (at[:, None] + torch.arange(rows, device=q.device)).clamp(0, max(0, cos.shape[0] - 1))
        return _rotated(x, cos[places][:, :, None], sin[places][:, :, None], is_interleaved)

    return by_rows(q, q.shape[1] if moves else 1), by_rows(k, k.shape[1])


def _checked(q: Tensor, k: Tensor, angles: tuple[object, object], capacity: int) -> tuple[Tensor, Tensor]:
    """cos and sin in float32."""
    width, found = q.shape[3], []
    if q.dtype.itemsize == 1 or k.dtype.itemsize == 1:
        raise TypeError(f"'rotary_cos': q is {q.dtype} and k is {k.dtype}; rotate rows before they are of 8 bits")
    for name, x in zip(("rotary_cos", "rotary_sin"), angles, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor [Nmax, R / 2], not {type(x).__name__}; pass both, or neither")
        if x.dim() != 2 or x.shape[0] < capacity or not 0 < 2 * x.shape[1] <= width:
            raise ValueError(
                f"'{name}' has shape {list(x.shape)}; [Nmax, R / 2] is expected, of {capacity} or more rows and at "
                f"most {width // 2} columns"
            )
        if x.dtype is not q.dtype or x.device != q.device:
            raise TypeError(f"'{name}' is {x.dtype} on {x.device}; q is {q.dtype} on {q.device}")
        found.append(x)
    cos, sin = found
    if cos.shape != sin.shape:
        raise ValueError(f"'rotary_cos' has shape {list(cos.shape)} and 'rotary_sin' {list(sin.shape)}; they differ")
    return cos.float(), sin.float()


def _positions(first: int | Tensor, q: Tensor) -> Tensor:
    """The position of the first row of each sequence."""
    if isinstance(first, Tensor):
        if not is_integral(first.dtype) or first.shape not in ((), (1,), q.shape[:1]):
            raise ValueError(
                f"'rotary_seqlens' is {first.dtype} {list(first.shape)}; i32[{q.shape[0]}] is expected, the position "
                "of the first new row of each sequence"
            )
    elif as_number(first, whole=True) is None:
        raise TypeError(f"'rotary_seqlens' must be a tensor (i32[B]) or an int, not {type(first).__name__}")
    return torch.as_tensor(first, device=q.device).long().expand(q.shape[0])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    count = 2 * cos.shape[-1]
    first, rest = x[..., :count].float(), x[..., count:]
    a, b = (first[..., ::2], first[..., 1::2]) if is_interleaved else first.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    rows = torch.stack(turned, -1).flatten(-2) if is_interleaved else torch.cat(turned, -1)
    return torch.cat((rows.to(x.dtype), rest), -1)
