"""The functions that users call: ``flex_attention``, and those that return ops and specs of mods."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex.masks import BlockMask, mod_of
from flashgen.flex.ops import Bindings, ModOp, bind, check_ints, compiled, family, named, remember, wanted_gradients
from flashgen.flex.shapes import Shapes, declared
from flashgen.flex.specs import FACTOR, SCALE, Shell, check_name, make_spec, name_of, user_names
from flashgen.flex.tracing import Mod
from flashgen.ir.spec import HeadDim
from flashgen.ir.text import spec_text
from flashgen.language.statements import MAX_HEAD_DIM
from flashgen.op.conversion import as_number, head_dim_argument
from flashgen.op.op import AttentionOp

__all__ = ["AuxOutput", "AuxRequest", "check_aux", "check_options"]

if hasattr(torch_flex, "AuxRequest"):
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
else:  # before PyTorch 2.9

    class AuxRequest(NamedTuple):  # type: ignore[no-redef]
        """What is wanted beside o."""

        lse: bool = False
        max_scores: bool = False

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        """What was wanted; None: not this."""

        lse: Tensor | None = None
        max_scores: Tensor | None = None


_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
# Options that promise or prefer what changes no result here: rows without a key are 0 whatever is promised of them, and
# no scale is rounded into q.
_SILENT = frozenset(("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "USE_TMA", "BACKEND"))
_RESULTS = {"OUTPUT_LOGSUMEXP": "lse", "OUTPUT_MAX": "max_scores"}
_TOLD: set[str] = set()  # names that this process has been warned of


def check_options(options: object) -> None:
    """Take what steers FlexAttention's kernels, and tell once a process that it means nothing here.

    Raises ``TypeError`` and ``ValueError`` for what FlexAttention refuses, too.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"'kernel_options' must be a dict, not {type(options).__name__}")
    for name, field in _RESULTS.items():
        if name in options:
            raise ValueError(
                f"kernel_options: '{name}' is set by what a call asks for: return_aux=AuxRequest({field}=True)"
            )
    backend = options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ValueError(f"kernel_options: 'BACKEND' is {backend!r}; FlexAttention has {', '.join(_BACKENDS)}")
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise ValueError(
            "kernel_options: 'BACKEND' and 'FORCE_USE_FLEX_ATTENTION' exclude each other; BACKEND is enough"
        )
    names = {str(name) for name in options if name not in _SILENT} | ({"BACKEND"} if backend != "AUTO" else set())
    if not names <= _TOLD:
        _TOLD.update(names)
        warnings.warn(
            f"kernel_options: {', '.join(sorted(names))} steer kernels of FlexAttention and mean nothing to flashgen, "
            "whose own are tuned by 'flashgen tune'",
            stacklevel=3,
        )


def check_aux(request: object, return_lse: bool) -> None:
    """Raise ``TypeError`` and ``ValueError`` where what is wanted beside o is not said as FlexAttention takes it."""
    if not isinstance(request, AuxRequest):
        raise TypeError(f"'return_aux' must be an AuxRequest, not {type(request).__name__}; AuxRequest(lse=True)")
    if return_lse:
        raise ValueError("return_lse and return_aux cannot be given both; use return_aux=AuxRequest(lse=True)")


Mask = BlockMask | torch_flex.BlockMask
_Mods = tuple[Mod | None, Mod | None]
_Rows = tuple[Tensor, Tensor, Tensor]
_FEW = 16  # columns of v in a call that wants the maxima alone


_head_dim = functools.lru_cache(maxsize=64)(HeadDim)  # made once, as it costs more than the lookup


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """FlexAttention, compiled: ``query`` [B, H, Nq, D], ``key`` [B, Hkv, Nk, D], ``value`` [B, Hkv, Nk, Dv].

    Returns ``o`` [B, H, Nq, Dv], which lies in memory as ``query`` does; with ``return_lse`` also ``lse`` [B, H, Nq],
    float32, the natural logarithm; with ``return_aux`` an ``AuxOutput``. Its ``max_scores`` [B, H, Nq] are the largest
    scores of rows, −inf where these have no key; they have no gradients, and take a second forward pass. ``block_mask``
    is a mask of ``create_block_mask``, of flashgen's or of PyTorch's. Keys and values of 8 bits beside queries of more
    are read in the type of these. Captured tensors that require gradients get them, bitwise repeatably where
    ``deterministic`` (None: where PyTorch's deterministic algorithms are on). ``kernel_options`` are taken, and mean
    nothing here. ``backend`` is that of ``flashgen.load``.

    Raises ``SpecError`` for a mod that cannot be compiled, with its file and line, and ``ValueError`` or ``TypeError``
    for arguments that do not fit or are not supported, by their names.

    Under ``torch.compile`` the call is a graph break; for whole graphs take the op of ``from_mods``.
    """
    if torch.compiler.is_dynamo_compiling():
        by_name: Any = {"return_aux": return_aux, "deterministic": deterministic, "backend": backend}
        return _outside(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **by_name
        )
    _check_tensors(query, key, value)
    if kernel_options is not None:
        check_options(kernel_options)
    if return_aux is not None:
        check_aux(return_aux, return_lse)
    if key.dtype is not query.dtype or value.dtype is not query.dtype:
        key, value = _as_wide(key, query), _as_wide(value, query)
    if scale is not None and scale == 1 / math.sqrt(query.shape[3]):
        scale = None
    mask_mod, meant_for = _mask_mod(block_mask)
    bound = bind(score_mod, mask_mod, query.device)
    # For as long as the mods do not change, what is found hangs on this alone, and so do the checks on the way.
    call = (query.shape, key.shape, value.shape, meant_for, enable_gqa, scale is None, backend)
    found = bound.calls.get(call)
    if found is None:
        _check_fit(block_mask if mask_mod is not None else None, query, key, enable_gqa)
        found = _found(bound, call, (score_mod, mask_mod), (query, key, value), scale is not None, backend)
    if key.shape[0] == 1 < query.shape[0] and value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    wants_lse = return_lse if return_aux is None else return_aux.lse
    result = _called(found, bound, (query, key, value), scale, wants_lse, deterministic)
    if return_aux is None:
        return result
    o, lse = result if wants_lse else (result, None)
    if not return_aux.max_scores:
        return o, AuxOutput(lse=lse)
    rows, of_maxima = (query, key, value[..., :_FEW]), (*call, "maxima")
    found = bound.calls.get(of_maxima) or _found(
        bound, of_maxima, (score_mod, mask_mod), rows, scale is not None, backend, maxima=True
    )
    with torch.no_grad():
        _, top = _called(found, bound, rows, scale, True, deterministic)
    return o, AuxOutput(lse=lse, max_scores=top / FACTOR)


# Dynamo would trace the tracing of mods, and what it compiles of that holds for one mod. It is disabled as by
# torch.compiler.disable, which would import Dynamo here and not when it is called.
_outside: Any = _disable_dynamo(flex_attention)


def _called(
    made: ModOp, bound: Bindings, rows: _Rows, scale: float | None, wants_lse: bool, deterministic: bool | None
) -> Any:
    captured = named(bound, made) if made.names else {}
    if scale is not None:
        captured[SCALE] = scale
    op: Any = made.op
    try:
        return op(*rows, return_lse=wants_lse, deterministic=deterministic, **captured)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise
        # Captured values are called as in the mods.
        names = zip((*made.names, SCALE), (*bound.trace.names, "scale"), strict=True)
        known = {own: theirs for own, theirs in names if theirs}
        message = re.sub(rf"\b([tp]\d+|{SCALE})\b", lambda found: known.get(found[0], found[0]), str(error))
        raise type(error)(message) from error


def _as_wide(x: Tensor, query: Tensor) -> Tensor:
    """8-bit keys or values converted to the type of the queries, which holds them exactly."""
    return x.to(query.dtype) if x.is_floating_point() and x.itemsize == 1 < query.itemsize else x


def _found(
    bound: Bindings, key: Hashable, mods: _Mods, rows: _Rows, scaled: bool, backend: str | None, maxima: bool = False
) -> ModOp:
    """The op of a call, kept but for nested tensors, whose shapes do not tell lengths. Raises ``SpecError``."""
    query, keys, value = rows
    batch, heads, q_len, width = query.shape
    sizes = {"B": batch, "H": heads, "Hkv": keys.shape[1], "Nq": q_len, "Nk": keys.shape[2]}
    longest, is_nested = sizes, query.is_nested or keys.is_nested
    if is_nested:
        longest = {**sizes, "Nq": _most_rows(query), "Nk": _most_rows(keys)}
        sizes |= {"Nq": _NO_LENGTH, "Nk": _NO_LENGTH}
    check_ints(bound, longest, mods)
    find = family(bound.trace.traced, _head_dim(width, value.shape[3]), scaled, backend, maxima=maxima)
    made = find(sizes, tuple([x.shape for x in bound.tensors]), wanted_gradients(bound))
    if not is_nested:
        remember(bound.calls, key, made)
    return made


# Sequences of a nested tensor have lengths of their own: no captured tensor grows with them.
_NO_LENGTH = -(2**40)


def _most_rows(x: Any) -> int:
    """The length of the longest sequence of a nested tensor, where it is known, else the number of rows of all."""
    if not x.is_nested:
        return int(x.shape[2])
    most: int | None = x._maybe_max_seqlen
    return x.values().numel() // max(1, x.shape[1] * x.shape[3]) if most is None else most


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; [batch, heads, length, head dimension] is expected")


def _mask_mod(mask: object) -> tuple[Mod | None, Hashable]:
    """The mask_mod of a mask, and the sizes that the mask is for."""
    if mask is None:
        return None, None
    if isinstance(mask, BlockMask):
        return mask.mask_mod, (mask.shape, mask.BLOCK_SIZE, mask.is_nested)
    if isinstance(mask, torch_flex.BlockMask):
        return mod_of(mask), (mask.shape, tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE))
    hint = "; a mask_mod becomes one by create_block_mask" if callable(mask) else ""
    raise TypeError(f"'block_mask' must be a BlockMask, not {type(mask).__name__}{hint}")


def _check_fit(mask: Mask | None, query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    """Raise ``ValueError`` where heads differ without ``enable_gqa``, and where a mask has other sizes."""
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"'query' has {query.shape[1]} heads and 'key' has {key.shape[1]}; pass enable_gqa=True for grouped queries"
        )
    if mask is None:
        return
    is_nested = query.is_nested or key.is_nested
    if is_nested is not getattr(mask, "is_nested", False):
        raise ValueError(
            "'block_mask' is for tensors of one length, but 'query' or 'key' is nested; use create_nested_block_mask"
            if is_nested
            else "'block_mask' is for nested tensors, but 'query' is none; use create_block_mask"
        )
    if is_nested:
        return
    lengths = (query.shape[2], key.shape[2])
    if tuple(mask.seq_lengths) != lengths and min(mask.BLOCK_SIZE) < 1 << 30:
        raise ValueError(
            f"'block_mask' is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, but there are "
            f"{lengths[0]} and {lengths[1]}; create one for these lengths (it costs nothing)"
        )
    entries, heads = query.shape[:2]
    for name, there, count in (("batch entries", mask.shape[0], entries), ("heads", mask.shape[1], heads)):
        if there not in (1, count):
            raise ValueError(f"'block_mask' is for {there} {name}, 'query' has {count}")


# -- ops and specs -----------------------------------------------------------------------------------------------------


def from_mods(
    *,
    score_mod: Mod | None = None,
    mask_mod: Mod | Mask | None = None,
    head_dim: int | tuple[int, int] = 64,
    shape: tuple[int, int, int, int] | None = None,
    name: str | None = None,
    backend: str | None = None,
) -> tuple[AttentionOp, dict[str, Any]]:
    """The op of mods, and what they capture, by name: ``op(q, k, v, **captured)``.

    ``head_dim`` may be (D, Dv). ``shape`` is (B, H, Nq, Nk): with it, dimensions of captured tensors that are as long
    as a size are declared as that size, if what reads them follows it, and ints are refused that leave 32 bits at these
    lengths; without it, dimensions are sizes if a position itself reads them, and nothing is known of ints.
    Raises ``SpecError``, and ``ValueError`` for a head dimension that is none.
    """
    bound, shell, shapes = described(score_mod, mask_mod, head_dim, shape, name)
    made = compiled(bound.trace.traced, shell, shapes, wanted_gradients(bound), backend)
    return made.op, named(bound, made)


def to_spec(
    *,
    score_mod: Mod | None = None,
    mask_mod: Mod | Mask | None = None,
    head_dim: int | tuple[int, int] = 64,
    shape: tuple[int, int, int, int] | None = None,
    name: str | None = None,
) -> str:
    """The ``.attn`` that mods mean. Captured numbers are params, with their present values as defaults.

    The arguments are those of ``from_mods``. Raises ``SpecError``.
    """
    bound, shell, shapes = described(score_mod, mask_mod, head_dim, shape, name)
    full = replace(shell, defaults=tuple(None if isinstance(x, Tensor) else x for x in bound.params))
    return spec_text(make_spec(bound.trace.traced, full, shapes, wanted_gradients(bound)))


def _checked_head_dim(given: object) -> HeadDim:
    found = head_dim_argument(given)
    if found is None or not all(1 <= each <= MAX_HEAD_DIM for each in (found.qk, found.v)):
        raise ValueError(f"'head_dim' is {given!r}; an int from 1 to {MAX_HEAD_DIM}, or two, (D, Dv), is expected")
    return found


def described(
    score_mod: Mod | None,
    mask: Mod | Mask | None,
    head_dim: int | tuple[int, int],
    shape: tuple[int, int, int, int] | None,
    name: str | None,
) -> tuple[Bindings, Shell, Shapes]:
    """The mods with their captured values, the rest of a spec of them, and the shapes that it declares."""
    mask_mod = mod_of(mask) if isinstance(mask, torch_flex.BlockMask) else mask
    if name is not None:
        check_name(name)
    lengths = [as_number(each, whole=True) for each in shape] if isinstance(shape, (tuple, list)) else []
    if shape is not None and (len(lengths) != 4 or any(each is None or each < 0 for each in lengths)):
        raise ValueError(f"'shape' is {shape!r}; (B, H, Nq, Nk) is expected")
    bound = bind(score_mod, mask_mod, torch.device("cpu"))
    names = user_names(bound.trace.traced, bound.trace.names)
    shell = Shell(name_of(score_mod, mask_mod) if name is None else name, _checked_head_dim(head_dim), names)
    sizes = None
    if shape is not None:
        sizes = {"B": shape[0], "H": shape[1], "Hkv": shape[1], "Nq": shape[2], "Nk": shape[3]}
        check_ints(bound, sizes, (score_mod, mask_mod))
    return bound, shell, declared(bound.trace.traced, tuple(x.shape for x in bound.tensors), sizes)
