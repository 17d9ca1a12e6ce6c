"""``flash_attn_varlen_func``: sequences of any lengths, one behind the other.

In: FlashAttention's arguments, tensors [T, H, D]. The op of the same ``Layer`` as for batches of one length runs here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashgen.flash.dense import check_of_heads, layer_of


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention within each sequence: ``q`` [Tq, H, D], ``k`` [Tk, Hkv, D], ``v`` [Tk, Hkv, Dv] → ``o`` [Tq, H, Dv].

    Sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and those of ``cu_seqlens_k`` of k and v.
    All options mean what they mean for ``flash_attn_func``, by each sequence's own lengths; ``lse`` is [H, Tq]. Keys
    in pages (``block_table``) are for ``flash_attn_with_kvcache``.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    if block_table is not None:
        raise ValueError("'block_table': keys in pages are taken by flash_attn_with_kvcache, and by `decode` of any op")
    for name, x, form in (("q", q, "[Tq, H, D]"), ("k", k, "[Tk, Hkv, D]"), ("v", v, "[Tk, Hkv, Dv]")):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor {form}, not {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(f"'cu_seqlens_q' must be a tensor of cumulative lengths, not {type(cu_seqlens_q).__name__}")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() == 0:
        raise ValueError(f"'cu_seqlens_q' has shape {list(cu_seqlens_q.shape)}; [B + 1] is expected")
    batch, heads = cu_seqlens_q.numel() - 1, q.shape[1]
    check_of_heads(alibi_slopes, s_aux, batch, heads)
    layer, captured = layer_of(
        (q, v, batch), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_attn_probs
    )
    result = layer.op().varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        return_lse=return_attn_probs,
        dropout_p=dropout_p if dropout_p > 0 else None,
        deterministic=True if deterministic else None,
        **captured,
    )
    return (*result, None) if return_attn_probs else result
