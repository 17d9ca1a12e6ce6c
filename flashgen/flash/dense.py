"""``flash_attn_func`` and its packed forms: batches of one length.

In: FlashAttention's arguments, tensors [B, N, H, D]. The op that ``options.py`` finds for them runs on transposed
views, so that nothing is copied.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from flashgen.flash.options import (
    ByName,
    check_names,
    plan_call,
    sizes_of,
    unpacked,
    with_options_of,
    with_second_query,
)

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
