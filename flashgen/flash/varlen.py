"""``flash_attn_varlen_func`` and its packed forms: sequences of any lengths, one behind the other.

In: FlashAttention's arguments, tensors [T, H, D]. The op of the same ``Layer`` as for batches of one length runs here,
through its ``varlen``.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from flashgen.flash.options import ByName, check_names, check_rows, either, has_rows, unpacked, with_options_of
from flashgen.flash.rows import Ragged, longest_argument, rows_of_cache, starts_argument, used_argument


class RaggedByName(ByName, total=False):
    """Those of sequences beside the options of ``ByName``.

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
        (k, v, cu_seqlens_k), used_k = _rows_of_pages(q, (k, v), table, q_starts, cu_seqlens_k, used_k, most[1]), None
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
    starts, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, starts[0], starts[1], most[0], most[1], *options, **by_name)


def _rows_of_pages(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    table: Tensor,
    q_starts: Tensor,
    k_starts: Tensor | None,
    used: Tensor | None,
    most: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values of all sequences, and where each begins."""
    (k, v), batch = pages, q_starts.shape[0] - 1
    check_rows({"q": (q, "[Tq, H, D]"), "k": (k, "[pages, page, Hkv, D]"), "v": (v, "[pages, page, Hkv, Dv]")})
    if used is not None:
        lengths = used_argument("seqused_k", used, batch, q.device)
    else:
        starts = starts_argument("cu_seqlens_k", k_starts)
        lengths = starts[1:] - starts[:-1]
    places = {"block_table": table, "cache_batch_idx": None, "leftpad": None}
    return rows_of_cache(q, k, v, batch, lengths, places, most)
