"""``flash_attn_func`` and its packed forms: batches of one length.

In: FlashAttention's arguments, tensors [B, N, H, D]. A ``Layer`` says what they ask for; its op runs on transposed
views, so that nothing is copied.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.language.statements import MAX_HEAD_DIM
from flashgen.layer import LOWER_RIGHT, Layer, conjunction
from flashgen.runtime.conversion import as_number


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
) -> Any:
    """Attention: ``q`` [B, Nq, H, D], ``k`` [B, Nk, Hkv, D], ``v`` [B, Nk, Hkv, Dv] → ``o`` [B, Nq, H, Dv].

    H is a multiple of Hkv. ``causal`` and ``window_size`` (left, right) are aligned to the lower right corner: query i
    stands at key i + Nk − Nq and sees the keys from ``left`` before it to ``right`` after it; below 0 is without a
    limit, and ``causal`` sets right to 0. A row without a key is 0. ``softmax_scale`` None is 1/√D. ``softcap`` c > 0
    makes scores c·tanh(s/c). ``alibi_slopes``, [H] or [B, H], add −slope·|i + Nk − Nq − j|, and receive a gradient.
    ``s_aux`` [H] are sinks: a score for each head that enters the denominator and has no value; they receive a
    gradient, too. ``dropout_p`` drops weights; torch's generator decides which. ``deterministic`` makes gradients
    bitwise repeatable.

    q, k and v may be ``torch.float8_e4m3fn``, all three: they are multiplied by ``q_descale``, ``k_descale`` and
    ``v_descale``, float32 [B, Hkv] or one number each, and ``o`` is bfloat16, without gradients.

    With ``return_attn_probs`` returns ``(o, lse, None)``: ``lse`` [B, H, Nq], float32, the natural logarithm of the
    denominator, differentiable, −inf for a row without a key. FlashAttention's third result, the weights with the signs
    of what was dropped, exists nowhere: asked for together with dropout it is refused.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    _check(q, k, v, alibi_slopes, s_aux)
    layer, captured = layer_of(
        (q, v, q.shape[0]), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux,
        return_attn_probs,
    )  # fmt: skip
    result = layer.op()(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        return_lse=return_attn_probs,
        dropout_p=dropout_p if dropout_p > 0 else None,
        deterministic=True if deterministic else None,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        **captured,
    )
    if return_attn_probs:
        return result[0].transpose(1, 2), result[1], None
    return result.transpose(1, 2)


def layer_of(
    inputs: tuple[Tensor, Tensor, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    return_attn_probs: bool,
) -> tuple[Layer, dict[str, Any]]:
    """What FlashAttention's options ask for, and what is captured; ``inputs`` are q, v and the number of sequences.

    Raises ``ValueError`` and ``TypeError`` by name for options that do not fit.
    """
    q, v, batch = inputs
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    _check_numbers(q, v, dropout_p, softmax_scale, softcap)
    if return_attn_probs and dropout_p > 0:
        raise ValueError(
            "return_attn_probs: with dropout FlashAttention returns the matrix of weights, which is never made here; "
            "pass dropout_p=0.0 to get lse alone"
        )
    left, right = _window(window_size, causal)
    conditions, declarations = [], []
    captured: dict[str, Any] = {"scaling": softmax_scale}
    if right == 0:
        conditions.append(f"j <= {LOWER_RIGHT}")
    elif right > 0:
        conditions.append(f"j <= {LOWER_RIGHT} + right")
        declarations.append("param right: i32")
        captured["right"] = right
    if left >= 0:
        conditions.append(f"j >= {LOWER_RIGHT} - left")
        declarations.append("param left: i32")
        captured["left"] = left
    if softcap > 0:
        captured["cap"] = softcap
    if alibi_slopes is not None:
        captured["slopes"] = alibi_slopes.expand(batch, q.shape[-2])
    if s_aux is not None:
        captured["sinks"] = s_aux
    layer = Layer(
        head_dim=(int(q.shape[-1]), int(v.shape[-1])),
        softcap=softcap > 0,
        slopes=alibi_slopes is not None,
        sinks=s_aux is not None,
        dropout=dropout_p > 0,
        mask=conjunction(conditions),
        declarations=tuple(declarations),
    )
    return layer, captured


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` of one tensor ``qkv`` [B, N, 3, H, D], which holds q, k and v."""
    q, k, v = _unpacked("qkv", qkv, 3, "[B, N, 3, H, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, s_aux=s_aux)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` of ``q`` [B, Nq, H, D] and one tensor ``kv`` [B, Nk, 2, Hkv, D], which holds k and v."""
    k, v = _unpacked("kv", kv, 2, "[B, Nk, 2, Hkv, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, s_aux=s_aux)


def _check_numbers(q: Tensor, v: Tensor, dropout_p: Any, softmax_scale: Any, softcap: Any) -> None:
    """Raise ``TypeError`` and ``ValueError`` for options and head dimensions that do not fit."""
    for name, x in (("q and k", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"the head dimension of {name} is {x.shape[-1]}; 1 to {MAX_HEAD_DIM} are supported")
    for name, given in (("dropout_p", dropout_p), ("softmax_scale", softmax_scale), ("softcap", softcap)):
        if as_number(given, whole=False) is None and not (isinstance(given, Tensor) and given.dim() == 0):
            raise TypeError(f"'{name}' must be a number, not {type(given).__name__}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"'dropout_p' is {dropout_p}; expected a number from 0 on that is less than 1")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"'softcap' is {softcap}; expected a number above 0, or 0 for none")


def _window(window_size: Any, causal: bool) -> tuple[int, int]:
    """How many keys a query sees to its left and right; −1 for all."""
    sides = window_size if isinstance(window_size, (tuple, list)) else (None,)
    numbers = [as_number(side, whole=True) for side in sides]
    if None in numbers or len(numbers) != 2:
        kind = TypeError if None in numbers else ValueError
        raise kind(f"'window_size' is {window_size!r}; expected two ints (left, right), -1 for no limit")
    # No position lies further away; what does would leave 32 bits in the condition.
    left, right = (-1 if side < 0 or side >= SIZE_LIMIT else side for side in numbers)
    return left, 0 if causal else right


def _unpacked(name: str, packed: Tensor, count: int, form: str) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor):
        raise TypeError(f"'{name}' must be a tensor {form}, not {type(packed).__name__}")
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(f"'{name}' has shape {list(packed.shape)}; {form} is expected")
    return packed.unbind(2)


def _check(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, s_aux: Tensor | None) -> None:
    """Raise where tensors do not fit, in terms of FlashAttention's layout; the rest is checked by the op."""
    for name, x, form in (("q", q, "[B, Nq, H, D]"), ("k", k, "[B, Nk, Hkv, D]"), ("v", v, "[B, Nk, Hkv, Dv]")):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor {form}, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")
    batch, _, heads, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width or tuple(v.shape[:3]) != tuple(k.shape[:3]):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{shapes}: expected q [B, Nq, H, D], k [B, Nk, Hkv, D], v [B, Nk, Hkv, Dv]")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(f"'q' has {heads} heads and 'k' has {k.shape[2]}; H must be a multiple of Hkv")
    check_of_heads(alibi_slopes, s_aux, batch, heads)


def check_of_heads(alibi_slopes: object, s_aux: object, batch: int, heads: int) -> None:
    """Raise ``ValueError`` and ``TypeError`` where ALiBi's slopes or sinks are none."""
    for name, x, forms in (
        ("alibi_slopes", alibi_slopes, {"[H]": (heads,), "[B, H]": (batch, heads)}),
        ("s_aux", s_aux, {"[H]": (heads,)}),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor {' or '.join(forms)}, not {type(x).__name__}")
        if tuple(x.shape) not in forms.values():
            wanted = " or ".join(f"{form} = {list(shape)}" for form, shape in forms.items())
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {wanted} is expected")
