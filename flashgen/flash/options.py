"""The options of FlashAttention's functions, beside q, k and v: checked here for all functions.

In: the arguments that every function has, by position or by name. Out: a ``PlannedCall``: the op of a ``Layer``, the
values that it captures, and the form of results. Everything that follows from numbers alone is cached by these numbers,
so that a short call checks them once.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.language.statements import MAX_HEAD_DIM
from flashgen.op.conversion import as_number, splits_argument
from flashgen.op.layer import LOWER_RIGHT, Layer, conjunction, scale_of

# Options that every function has by position: dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
# deterministic, return_attn_probs.
Positional = tuple[Any, ...]
_Function = TypeVar("_Function", bound=Callable[..., Any])
# Left and right in keys; None: that side has no end.
Window = tuple[int | None, int | None]


class CommonOptions(TypedDict, total=False):
    """Options of all functions by name alone: in FlashAttention's versions 3 and 4 they stand at different places.

    ``s_aux`` [H], also called ``learnable_sink``, are sinks: a score for each head that enters the denominator and has
    no value; they receive a gradient. ``qv`` is a second query, of the head dimension of v: scores are
    softmax_scale · (q·k + qv·v), and ``softmax_scale`` None is 1/√(D + Dv). ``attention_chunk`` c > 0 lets queries see
    keys of their own chunk: (i + Nk − Nq) // c == j // c. Rows of 8 bits (``torch.float8_e4m3fn``) are multiplied by
    ``q_descale``, ``k_descale`` and ``v_descale``, float32 [B, Hkv] or one number each. ``return_lse`` returns
    ``(o, lse)``. ``pack_gqa`` and ``sm_margin`` say how FlashAttention's kernels work: they change no result.
    """

    s_aux: Tensor | None
    learnable_sink: Tensor | None
    qv: Tensor | None
    attention_chunk: int
    q_descale: Tensor | float | None
    k_descale: Tensor | float | None
    v_descale: Tensor | float | None
    return_lse: bool
    pack_gqa: bool | None
    sm_margin: int


class ByName(CommonOptions, total=False):
    """``CommonOptions``, and the options that ``flash_attn_with_kvcache`` has by position.

    ``return_softmax_lse`` is another name of ``return_lse``. ``num_splits`` changes no result.
    """

    return_softmax_lse: bool
    num_splits: int


class CallSizes(NamedTuple):
    """The number of sequences, the number of query heads, and the head dimensions of q and k, and of v.

    ``place`` is the position of query i among the keys, as an expression of the language.
    """

    batch: int
    heads: int
    width: int
    v_width: int
    place: str = LOWER_RIGHT


class PlannedCall(NamedTuple):
    """The op of a call, its captured values, and the form of its results."""

    op: Any
    captured: Mapping[str, Any]
    training: Mapping[str, Any]  # dropout_p and deterministic, as the op takes them
    sees_all: bool  # queries see all keys, wherever they stand
    has_weights: bool
    has_lse: bool = False

    def results(self, found: Any, convert: Callable[[Tensor], Tensor] | None) -> Any:
        """The result of a function, from that of its op; ``convert`` gives o the layout or type of q."""
        o, *rest = found if self.has_lse else (found,)
        o = o if convert is None else convert(o)
        results = (o, *rest, None) if self.has_weights else (o, *rest)
        return results if len(results) > 1 else o


def plan_call(
    sizes: CallSizes, given: Positional, by_name: Mapping[str, Any], padding: Tensor | None = None
) -> PlannedCall:
    """The op and the options of a call. ``padding`` [B]: the number of rows before a sequence's first key, from which
    chunks count.

    Raises ``ValueError`` and ``TypeError`` by name for options that do not fit.
    """
    dropout_p, scale, causal, window_size, softcap, slopes, deterministic, has_weights = given
    sinks, chunk, has_lse = None, 0, has_weights
    if by_name:
        sinks, chunk = either(by_name, "s_aux", "learnable_sink"), by_name.get("attention_chunk", 0)
        has_lse = _check_by_name(by_name) or has_weights
    if slopes is not None:
        _check_of_heads("alibi_slopes", slopes, {"[H]": (sizes.heads,), "[B, H]": (sizes.batch, sizes.heads)})
    if sinks is not None:
        _check_of_heads("s_aux" if by_name.get("s_aux") is sinks else "learnable_sink", sinks, {"[H]": (sizes.heads,)})
    left, right = window_size if type(window_size) is tuple and len(window_size) == 2 else _sides(window_size)
    numbers = (
        sizes.width, sizes.v_width, dropout_p, scale, causal, left, right, softcap, deterministic, has_weights, chunk,
        slopes is not None, sinks is not None, padding is not None, sizes.place,
    )  # fmt: skip
    has_tensor = isinstance(scale, Tensor) or isinstance(dropout_p, Tensor) or isinstance(softcap, Tensor)
    known = None if has_tensor or torch.compiler.is_compiling() else _remembered(numbers)
    asked = known or _settle(*numbers)
    if slopes is sinks is padding is None:
        return asked._replace(has_lse=has_lse) if has_lse else asked
    captured = dict(asked.captured)
    if slopes is not None:
        captured["slopes"] = slopes.expand(sizes.batch, sizes.heads)
    if sinks is not None:
        captured["sinks"] = sinks
    if padding is not None:
        captured["padding"] = padding
    return asked._replace(captured=captured, has_lse=has_lse)


def _settle(
    width: int, v_width: int, dropout_p: Any, scale: Any, causal: Any, left: Any, right: Any, softcap: Any,
    deterministic: Any, has_weights: Any, chunk: Any, has_slopes: bool, has_sinks: bool, has_padding: bool,
    place: str,
) -> PlannedCall:  # fmt: skip
    """The part of a call that follows from numbers alone."""
    for name, size in (("q and k", width), ("v", v_width)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"the head dimension of {name} is {size}; 1 to {MAX_HEAD_DIM} are supported")
    switches = {"causal": causal, "deterministic": deterministic, "return_attn_probs": has_weights}
    for name, value in switches.items():
        check_bool(name, value)
    _check_numbers({"dropout_p": dropout_p, "softmax_scale": 1.0 if scale is None else scale, "softcap": softcap})
    if has_weights and dropout_p > 0:
        raise ValueError(
            "return_attn_probs: with dropout FlashAttention returns the matrix of weights, which is never made here; "
            "pass return_lse=True to get lse alone"
        )
    conditions, declarations = [], []
    captured = scale_of(scale, int(width))
    for name, value in zip(("left", "right"), _window((left, right), causal), strict=True):
        of_side = "j >= {} - {}" if name == "left" else "j <= {} + {}"
        if value == 0 and name == "right":
            conditions.append(f"j <= {place}")
        elif value is not None:
            conditions.append(of_side.format(place, name))
            declarations.append(f"param {name}: i32")
            captured[name] = value
    if _chunk(chunk):
        begin = " - padding[b]" if has_padding else ""
        conditions.append(f"({place}{begin}) // chunk == (j{begin}) // chunk")
        declarations += ["param chunk: i32", *(["tensor padding: i32[B]"] if has_padding else [])]
        captured["chunk"] = _chunk(chunk)
    if softcap > 0:
        captured["cap"] = softcap
    layer = Layer(
        head_dim=(int(width), int(v_width)),
        scaling="scaling" in captured,
        softcap=softcap > 0,
        slopes=has_slopes,
        sinks=has_sinks,
        dropout=dropout_p > 0,
        mask=conjunction(conditions),
        declarations=tuple(declarations),
        place=place,
    )
    training = {"dropout_p": dropout_p if dropout_p > 0 else None, "deterministic": True if deterministic else None}
    return PlannedCall(layer.op(), captured, training, not conditions, has_weights)


# ``typed``, as True and 1 are equal keys otherwise.
_settled = functools.lru_cache(maxsize=512, typed=True)(_settle)


def _remembered(numbers: tuple[Any, ...]) -> PlannedCall | None:
    """The cached part of a call; None where an argument has no hash, or is no number."""
    try:
        return _settled(*numbers)
    except TypeError:
        return None


def either(by_name: Mapping[str, Any], *names: str) -> Any:
    """The value of an option that has several names. Raises ``TypeError`` where it is given twice."""
    given = [name for name in names if by_name.get(name) is not None]
    if len(given) > 1:
        raise TypeError(f"'{given[0]}' and '{given[1]}' are two names of one argument; pass one of them")
    return by_name[given[0]] if given else None


def check_names(function: str, by_name: Mapping[str, Any], known: type) -> None:
    """Raise ``TypeError`` for a name that is no argument. ``known``: the ``TypedDict`` of options by name."""
    names = known.__annotations__
    for name in by_name:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


def check_bool(name: str, value: object, *, may_be_none: bool = False) -> None:
    """Raise ``TypeError`` for a value that is no bool."""
    if not (isinstance(value, bool) or (value is None and may_be_none)):
        raise TypeError(f"'{name}' is {value!r}; it must be {'None, ' if may_be_none else ''}True or False")


def has_rows(dims: int, *tensors: Any) -> bool:
    """Whether all are tensors of so many dimensions: a fast path before ``check_rows``."""
    for x in tensors:  # noqa: SIM110 - a generator would take half of the time
        if not isinstance(x, Tensor) or x.dim() != dims:
            return False
    return True


def check_rows(tensors: Mapping[str, tuple[object, str]]) -> None:
    """Raise ``TypeError`` and ``ValueError`` where a tensor by name has not the dimensions of its form."""
    for name, (x, form) in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor {form}, not {type(x).__name__}")
        if x.dim() != form.count(",") + 1:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")


def sizes_of(forms: Mapping[str, str], *rows: Tensor, pages: str = "") -> CallSizes:
    """The sizes of a call, whose ``rows`` begin with q, k and v; ``pages`` is the other form that k and v may have, for
    errors.

    Raises where tensors do not fit, in terms of FlashAttention's layout; the rest is checked by the op.
    """
    if not has_rows(4, *rows):
        check_rows({name: (x, form) for (name, form), x in zip(forms.items(), rows, strict=False)})
    q, k, v = rows[:3]
    (batch, _, heads, width), kv_heads, names = q.shape, k.shape[2], tuple(forms)[:3]
    if (k.shape[0] != batch and not pages) or k.shape[3] != width or v.shape[:3] != k.shape[:3]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(names, rows, strict=False))
        raise ValueError(f"{shapes}: expected {', '.join(f'{name} {forms[name]}' for name in names)}{pages}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"'q' has {heads} heads and '{names[1]}' has {kv_heads}; H must be a multiple of Hkv")
    return CallSizes(batch, heads, width, v.shape[3])


def unpacked(name: str, packed: Tensor, form: str) -> tuple[Tensor, ...]:
    """The tensors that are packed in one of a form such as ``[B, N, 3, H, D]``, along the dimension with a number."""
    check_rows({name: (packed, form)})
    axis, count = next((n, int(each)) for n, each in enumerate(form.strip("[]").split(", ")) if each.isdigit())
    if packed.shape[axis] != count:
        raise ValueError(f"'{name}' has shape {list(packed.shape)}; {form} is expected")
    return packed.unbind(axis)


def with_options_of(function: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """A decorator: adds the options of ``function``, from ``dropout_p`` on, to the signature."""

    def decorated(packed: _Function) -> _Function:
        own, options = (inspect.signature(each).parameters for each in (packed, function))
        rows = [each for each in own.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        rest = list(options.values())[list(options).index("dropout_p") :]
        packed.__signature__ = inspect.Signature([*rows, *rest], return_annotation=Any)  # type: ignore[attr-defined]
        return packed

    return decorated


def with_second_query(q: Tensor, k: Tensor, v: Tensor, qv: object) -> tuple[Tensor, Tensor]:
    """q and k whose products are q·k + qv·v: rows of both, side by side. Raises ``TypeError`` and ``ValueError``."""
    if not isinstance(qv, Tensor):
        raise TypeError(f"'qv' must be a tensor like q, of the head dimension of v, not {type(qv).__name__}")
    wanted = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != wanted or qv.dtype is not q.dtype or q.dtype is not v.dtype or q.dtype.itemsize == 1:
        raise ValueError(
            f"'qv' is {qv.dtype} {list(qv.shape)}; of {q.dtype} q and {v.dtype} v it has q's type, which is v's and of "
            f"more than 8 bits, and shape {list(wanted)}"
        )
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def _check_by_name(by_name: Mapping[str, Any]) -> bool:
    """Check the options by name; returns whether lse is wanted. Raises ``TypeError``, ``ValueError``."""
    splits_argument(by_name.get("num_splits", 0))
    check_bool("pack_gqa", by_name.get("pack_gqa"), may_be_none=True)
    if as_number(by_name.get("sm_margin", 0), whole=True) is None:
        raise TypeError(f"'sm_margin' must be an int, not {type(by_name['sm_margin']).__name__}")
    wants = {name: by_name.get(name, False) for name in ("return_lse", "return_softmax_lse")}
    for name, value in wants.items():
        check_bool(name, value)
    return any(wants.values())


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` and ``ValueError`` for numbers that do not fit."""
    for name, x in given.items():
        if as_number(x, whole=False) is None and not (isinstance(x, Tensor) and x.dim() == 0):
            raise TypeError(f"'{name}' must be a number, not {type(x).__name__}")
    dropout_p, softcap = given["dropout_p"], given["softcap"]
    if not 0 <= dropout_p < 1:
        raise ValueError(f"'dropout_p' is {dropout_p}; expected a number from 0 on that is less than 1")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"'softcap' is {softcap}; expected a number above 0, or 0 for none")


def _check_of_heads(name: str, x: object, forms: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` and ``TypeError`` for a tensor by heads with another shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor {' or '.join(forms)}, not {type(x).__name__}")
    if tuple(x.shape) not in forms.values():
        wanted = " or ".join(f"{form} = {list(shape)}" for form, shape in forms.items())
        raise ValueError(f"'{name}' has shape {list(x.shape)}; {wanted} is expected")


def _sides(window_size: Any) -> tuple[Any, Any]:
    """Left and right of a window that is no tuple of two: a list or a tensor."""
    sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(sides, (tuple, list)):
        raise _no_window(TypeError, window_size)
    if len(sides) != 2:
        raise _no_window(ValueError, window_size)
    return sides[0], sides[1]


def _no_window(kind: type[Exception], window_size: object) -> Exception:
    return kind(f"'window_size' is {window_size!r}; expected two ints (left, right), -1 or None for no limit")


def _window(sides: tuple[Any, Any], causal: bool) -> Window:
    """The number of keys that a query sees to its left and right; ``causal`` sets right to 0."""
    numbers = [None if side is None else as_number(side, whole=True) for side in sides]
    if any(number is None and side is not None for number, side in zip(numbers, sides, strict=True)):
        raise _no_window(TypeError, sides)
    # No position lies further away than the limit; what does would leave 32 bits in the condition.
    left, right = (None if n is None or n >= SIZE_LIMIT else max(n, 1 - SIZE_LIMIT) for n in numbers)
    if None not in sides:  # FlashAttention 4 alone has None, and means -1 by -1
        if (left is not None and left < 0) and (right is not None and right < 0):
            left = right = None
        left, right = (None if side == -1 else side for side in (left, right))
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        raise ValueError(
            f"'window_size' is {sides}{' beside causal' if causal else ''}: keys from {-left} to {right} after a query "
            "are none; pass -1 or None for a side without a limit"
        )
    return left, right


def _chunk(given: object) -> int:
    """The length of a chunk, 0 for none. Raises ``ValueError`` and ``TypeError``."""
    chunk = as_number(given, whole=True)
    if chunk is None:
        raise TypeError(f"'attention_chunk' must be an int, not {type(given).__name__}")
    if chunk < 0:
        raise ValueError(f"'attention_chunk' is {chunk}; the length of a chunk is expected, or 0 for none")
    return int(min(chunk, SIZE_LIMIT - 1))  # no position lies behind it
