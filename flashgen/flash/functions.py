"""FlashAttention's functions without a cache: of batches of one length, of sequences of any lengths, and of parts.

In: FlashAttention's arguments, tensors [B, N, H, D] and [T, H, D]. The op that ``options.py`` finds for the former runs
on transposed views, so that nothing is copied; for the latter its ``varlen`` runs.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from flashgen.flash.options import (
    ByName,
    check_names,
    check_rows,
    either,
    has_rows,
    plan_call,
    sizes_of,
    unpacked,
    with_options_of,
    with_second_query,
)
from flashgen.flash.rows import TYPES, Ragged, longest_argument, rows_of_cache, starts_argument, used_argument

_FORMS = {"q": "[B, Nq, H, D]", "k": "[B, Nk, Hkv, D]", "v": "[B, Nk, Hkv, Dv]"}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **by_name: Unpack[ByName],
) -> Any:
    """Attention: ``q`` [B, Nq, H, D], ``k`` [B, Nk, Hkv, D], ``v`` [B, Nk, Hkv, Dv] → ``o`` [B, Nq, H, Dv].

    H is a multiple of Hkv. ``causal`` and ``window_size`` (left, right) are aligned to the lower right corner: query i
    stands at key i + Nk − Nq and sees the keys from ``left`` before it to ``right`` after it; ``causal`` sets right to
    0. None, and −1 beside a number, is without a limit; other numbers below 0 move a side past the query: (−3, 8) are
    the keys from 3 to 8 after it. A row without a key is 0. ``softmax_scale`` None is 1/√D. ``softcap`` c > 0
    makes scores c·tanh(s/c). ``alibi_slopes``, [H] or [B, H], add −slope·|i + Nk − Nq − j|, and receive a gradient.
    ``dropout_p`` drops weights; torch's generator decides which. ``deterministic`` makes gradients bitwise repeatable.
    ``by_name`` are the options of ``ByName``.

    q, k and v may be ``torch.float8_e4m3fn``, all three: ``o`` then is bfloat16, without gradients.

    With ``return_attn_probs`` returns ``(o, lse, None)``: ``lse`` [B, H, Nq], float32, the natural logarithm of the
    denominator, differentiable, −inf or the sink for a row without a key. FlashAttention's third result, the weights
    with the signs of what was dropped, exists nowhere: asked for together with dropout it is refused.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    sizes = sizes_of(_FORMS, q, k, v)
    factors = {}
    if by_name:
        check_names("flash_attn_func", by_name, ByName)
        factors = {name: by_name.get(name) for name in ("q_descale", "k_descale", "v_descale")}
        if by_name.get("qv") is not None:
            q, k = with_second_query(q, k, v, by_name["qv"])
            sizes = sizes._replace(width=q.shape[3])
    asked = plan_call(sizes, given, by_name)
    found = asked.op(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        return_lse=asked.has_lse,
        **asked.training,
        **factors,
        **asked.captured,
    )
    return asked.results(found, lambda o: o.transpose(1, 2))


@with_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **by_name: Any) -> Any:
    """``flash_attn_func`` of one tensor ``qkv`` [B, N, 3, H, D], which holds q, k and v."""
    q, k, v = unpacked("qkv", qkv, "[B, N, 3, H, D]")
    return flash_attn_func(q, k, v, *options, **by_name)


@with_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **by_name: Any) -> Any:
    """``flash_attn_func`` of ``q`` [B, Nq, H, D] and one tensor ``kv`` [B, Nk, 2, Hkv, D], which holds k and v."""
    k, v = unpacked("kv", kv, "[B, Nk, 2, Hkv, D]")
    return flash_attn_func(q, k, v, *options, **by_name)


# -- sequences of any lengths ------------------------------------------------------------------------------------------


class RaggedByName(ByName, total=False):
    """Options of sequences of any lengths beside ``ByName``.

    Of each sequence the first ``seqused_q`` queries and ``seqused_k`` keys, int32 [B], are used; of the others o, lse
    and gradients are 0. ``page_table`` is FlashAttention 3's name of ``block_table``.
    """

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **by_name: Unpack[RaggedByName],
) -> Any:
    """Attention within each sequence: ``q`` [Tq, H, D], ``k`` [Tk, Hkv, D], ``v`` [Tk, Hkv, Dv] → ``o`` [Tq, H, Dv].

    Sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and those of ``cu_seqlens_k`` of k and v.
    Of rows behind the last sequence o, lse and gradients are 0. No sequence is longer than ``max_seqlen_q`` and
    ``max_seqlen_k``, which may be ints, 0-dim tensors or None. All options mean what they mean for
    ``flash_attn_func``, by each sequence's own lengths; ``lse`` is [H, Tq]. q, k and v of 8 bits are widened first.

    With ``block_table`` int32 [B, P] k and v are pages, [pages, page, Hkv, D]: of sequence b as many rows as
    ``seqused_k`` or the differences of ``cu_seqlens_k`` say. They are copied into rows, with gradients. For few queries
    a sequence ``flash_attn_with_kvcache`` reads pages where they lie.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    given = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q_starts = starts_argument("cu_seqlens_q", cu_seqlens_q)
    most = longest_argument("max_seqlen_q", max_seqlen_q), longest_argument("max_seqlen_k", max_seqlen_k)
    table, used_q, used_k = block_table, None, None
    if by_name:
        check_names("flash_attn_varlen_func", by_name, RaggedByName)
        table = either({**by_name, "block_table": block_table}, "block_table", "page_table")
        used_q, used_k = by_name.get("seqused_q"), by_name.get("seqused_k")
    if table is not None:
        check_rows({"q": (q, "[Tq, H, D]"), "k": (k, "[pages, page, Hkv, D]"), "v": (v, "[pages, page, Hkv, Dv]")})
        batch, places = q_starts.shape[0] - 1, {"block_table": table, "cache_batch_idx": None, "leftpad": None}
        if used_k is not None:
            lengths, used_k = used_argument("seqused_k", used_k, batch, q.device), None
        else:
            lengths = starts_argument("cu_seqlens_k", cu_seqlens_k).diff()
        k, v, cu_seqlens_k = rows_of_cache(q, k, v, batch, lengths, places, most[1])
    if not has_rows(3, q, k, v):
        check_rows({"q": (q, "[Tq, H, D]"), "k": (k, "[Tk, Hkv, D]"), "v": (v, "[Tk, Hkv, Dv]")})
    k_starts = q_starts if cu_seqlens_k is q_starts else starts_argument("cu_seqlens_k", cu_seqlens_k)
    rows = Ragged(q, k, v, q_starts, k_starts, most)
    if used_q is not None or used_k is not None:
        rows, given = rows.using({"seqused_q": used_q, "seqused_k": used_k}, given)
    return rows.attend(given, by_name)


@with_options_of(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, *options: Any, **by_name: Any
) -> Any:
    """``flash_attn_varlen_func`` of one tensor ``qkv`` [T, 3, H, D], which holds q, k and v of the same sequences."""
    q, k, v = unpacked("qkv", qkv, "[T, 3, H, D]")
    starts, most = starts_argument("cu_seqlens", cu_seqlens), longest_argument("max_seqlen", max_seqlen)
    return flash_attn_varlen_func(q, k, v, starts, starts, most, most, *options, **by_name)


@with_options_of(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *options: Any,
    **by_name: Any,
) -> Any:
    """``flash_attn_varlen_func`` of ``q`` [Tq, H, D] and one tensor ``kv`` [Tk, 2, Hkv, D], which holds k and v."""
    k, v = unpacked("kv", kv, "[Tk, 2, Hkv, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, **by_name)


# -- parts over different keys -----------------------------------------------------------------------------------------


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of all keys, of ``out_partial`` [splits, B, Nq, H, D] and ``lse_partial`` [splits, B, Nq, H].

    These are float32; of sequences one behind the other [splits, Tq, H, D] and [splits, Tq, H]. ``o`` is
    [B, Nq, H, D], of ``out_dtype``, by default float32, or is written to ``out``; ``lse`` is [B, Nq, H], float32. A
    part whose lse is −inf has no key; a row of which no part has one is 0, its lse −inf.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    given: Any = out_partial
    is_ragged = isinstance(given, Tensor) and given.dim() == 4
    form = "[splits, Tq, H, D]" if is_ragged else "[splits, B, Nq, H, D]"
    check_rows({"out_partial": (out_partial, form), "lse_partial": (lse_partial, form.replace(", D]", "]"))})
    if lse_partial.shape != out_partial.shape[:-1]:
        wanted = list(out_partial.shape[:-1])
        raise ValueError(f"'lse_partial' has shape {list(lse_partial.shape)}; {wanted} is expected")
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype is not torch.float32:
            raise TypeError(f"'{name}' is {x.dtype}; torch.float32 is expected")
    dtype = out_dtype or (torch.float32 if out is None else out.dtype)
    if dtype not in TYPES or (out is not None and (out.dtype is not dtype or out.shape != out_partial.shape[1:])):
        given = "" if out is None else f", and 'out' {out.dtype} {list(out.shape)}"
        raise ValueError(
            f"'out_dtype' is {out_dtype}{given}; one of {', '.join(map(str, TYPES))} is expected, of shape "
            f"{list(out_partial.shape[1:])}"
        )
    o, lse = _combined(out_partial, lse_partial)
    return (o.to(dtype) if out is None else out.copy_(o)), lse


def _combined(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if lse.shape[0] == 0:
        return o.sum(0), lse.new_full(lse.shape[1:], -math.inf)
    largest = lse.detach().amax(0)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(lse - largest)
    total = weights.sum(0)
    has_key = total > 0
    total = torch.where(has_key, total, 1.0)
    # What a part without a key holds is not read: it may be NaN.
    parts = torch.where((weights > 0)[..., None], o, 0.0) * (weights / total)[..., None]
    return parts.sum(0), torch.where(has_key, largest + total.log(), -math.inf)
