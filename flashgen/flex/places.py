"""Places in the user's own files, errors that point there, and what a mod cannot do.

In: an error message. Out: a ``SpecError`` at the innermost line of the stack that is neither flashgen's nor PyTorch's,
with the columns of the expression that was being evaluated.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NoReturn

import torch

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError, nearest, quoted_list


def spellings(folder: Path) -> tuple[str, ...]:
    """The path of a folder as imported, perhaps through links, and its real path."""
    return tuple(dict.fromkeys((str(folder.absolute()), str(folder.resolve()))))


NOT_THE_USERS = (*spellings(Path(__file__).parents[1]), *spellings(Path(torch.__file__).parent), "<frozen")


def refuse(code: str, message: str, *, hint: str = "") -> NoReturn:
    """Raise a ``SpecError`` that points to the line of the mod that is being traced."""
    raise_at(current_place(), code, message, hints=(hint,) if hint else ())


def refuse_at(function: object, code: str, message: str, *, hint: str = "") -> NoReturn:
    """Raise a ``SpecError`` that points to where a function is defined."""
    raise_at(place_of(function), code, message, hints=(hint,) if hint else ())


def refuse_raised(error: BaseException, mod: object) -> NoReturn:
    """Raise a ``SpecError`` for an exception of a mod, at the line that raised it, else where the mod begins."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if not _is_ours(trace.tb_frame.f_code):
            place = _span(trace.tb_frame, trace.tb_lasti)
        trace = trace.tb_next
    place = place or place_of(mod)
    if isinstance(error, KeyError) and any(isinstance(key, torch.Tensor) for key in error.args):
        raise_at(
            place,
            "E601",
            "a dict asks for a value that is known to the kernel alone, one for each pair",
            hints=("capture a tensor and index it: torch.tensor([…])[h]",),
        )
    message = f"the mod raised {type(error).__name__}: {str(error).strip() or 'without a message'}"
    raise_at(place, "E606", message.splitlines()[0])


def function_of(mod: Any) -> Any:
    """The function below masks and partials."""
    while True:
        of_class = getattr(type(mod), "__flashgen_mod__", None)
        if of_class is not None:
            mod = of_class(mod)
        elif isinstance(mod, functools.partial):
            mod = mod.func
        else:
            return mod


def place_of(function: object) -> Span | None:
    """The line where a function of the user begins; for an object with ``__call__``, that of the method."""
    function = function_of(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if not isinstance(code, CodeType) or _is_ours(code):
        return None
    return _whole_line(code.co_filename, code.co_firstlineno)


def current_place() -> Span | None:
    """The expression of the mod that is being evaluated."""
    return next((_span(each, each.f_lasti) for each in _frames() if not _is_ours(each.f_code)), None)


def raise_at(
    span: Span | None, code: str, message: str, notes: Sequence[str] = (), hints: Sequence[str] = ()
) -> NoReturn:
    """Raise a ``SpecError`` that points to a place."""
    sources = () if span is None else (Source(span.file, "".join(linecache.getlines(span.file))),)
    raise SpecError([Diagnostic(code, message, span, notes=tuple(notes), hints=tuple(hints))], sources)


def calling_function() -> type | None:
    """The ``autograd.Function`` of the user's whose ``forward`` is running in a mod."""
    return next((each.f_locals["cls"] for each in _frames() if each.f_code is _APPLY), None)


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

# Code that calls a mod: a search for the user's line ends here.
_BORDERS: set[CodeType] = set()


def border(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of ours that calls mods: its callers are no part of a mod."""
    _BORDERS.add(function.__code__)
    return function


def _frames() -> Iterator[FrameType]:
    """The frames of the running mod and of functions that it calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _BORDERS:
        yield frame
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(NOT_THE_USERS)


def _span(frame: FrameType, instruction: int) -> Span:
    code = frame.f_code
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    line, end_line, column, end_column = positions
    line = line or frame.f_lineno
    text = linecache.getline(code.co_filename, line)
    if column is None or end_line is None or end_column is None:
        return _whole_line(code.co_filename, line)
    # Columns of Python count bytes.
    start = len(text.encode()[:column].decode(errors="replace"))
    last = linecache.getline(code.co_filename, end_line)
    end = len(last.encode()[:end_column].decode(errors="replace"))
    return Span(code.co_filename, line, start + 1, end_line, end + 1)


def _whole_line(file: str, number: int) -> Span:
    text = linecache.getline(file, number)
    start = len(text) - len(text.lstrip())
    return Span(file, number, start + 1, number, len(text.rstrip()) + 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


_OF_NUMPY = "NumPy", "write torch's functions instead of NumPy's, and capture arrays as tensors: torch.from_numpy(x)"
_OF_TEXTS = "a text", "leave it out: a mod is run once, without numbers"
# What Python asks of a value to decide by it: how the user put it, and what to write instead.
DECISIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "__bool__": (
            "a Python condition ('if', 'and', 'or', 'not', 'while', 'assert', min, max)",
            "write torch.where(condition, x, y), and '&', '|', '~' for 'and', 'or', 'not'",
        ),
        "__int__": ("int()", "write x.int()"),
        "__float__": (
            "float(), or a function of Python's math,",
            "write x.float(), and torch's functions instead of math's",
        ),
        "__index__": (
            "a Python index ('range', a slice, a list)",
            "for a list of numbers, capture a tensor and index it: torch.tensor([…])[h]",
        ),
        "__len__": ("len()", ""),
        "__iter__": ("a loop", ""),
        "item": ("'.item()'", "leave it out: a value without dimensions is a number here"),
        "tolist": ("'.tolist()'", ""),
        **dict.fromkeys(("__array__", "numpy", "__array_wrap__"), _OF_NUMPY),
        **dict.fromkeys(("__format__", "__repr__"), _OF_TEXTS),
        "__contains__": ("'in'", ""),
        "nonzero": ("'.nonzero()'", ""),
    }
)
MISSING: Mapping[str, str] = MappingProxyType(
    {
        "expm1": "write torch.exp(x) - 1",
        **dict.fromkeys(("stack", "cat"), "write the values one by one: a mod computes one number for one pair"),
        "any": "write '|' between the conditions",
        "all": "write '&' between the conditions",
        "sum": "write '+' between the values",
        **dict.fromkeys(("gather", "index_select", "take"), "index the tensor: t[h, kv_idx]"),
        "nan_to_num": "write torch.where(torch.isnan(x), 0.0, x)",
        "isin": "compare with each value and write '|' between the conditions",
        "bucketize": "count the borders that are passed: (x > b0).int() + (x > b1).int()",
    }
)


def refuse_decision(name: str, *, hinted: bool = True) -> NoReturn:
    """Refuse an operation by which Python would decide on a value that only a kernel knows."""
    asked, instead = DECISIONS[name]
    hint = instead if hinted else ""
    refuse("E601", f"{asked} asks for a value that is known to the kernel alone, one for each pair", hint=hint)


def refuse_unknown(name: str, known: Iterable[str] = ()) -> NoReturn:
    """Refuse a function that is not in the table of operators."""
    shown = name.removeprefix("get:").strip("_") if name.startswith(("__", "get:")) else name
    if name == "__setitem__":
        refuse("E602", "a mod cannot assign to elements", hint="write torch.where(condition, x, y)")
    if shown in MISSING:
        refuse("E602", f"flashgen has no '{shown}' for a mod", hint=MISSING[shown])
    close = nearest(shown, [each for each in known if not each.startswith("_")], limit=3)
    hint = f"did you mean {quoted_list(close)}?" if close else "docs/flex.md lists the functions"
    refuse("E602", f"flashgen has no '{shown}' for a mod", hint=hint)
