"""Places in the user's own files, and errors that point there.

In: an error message. Out: a ``SpecError`` at the innermost line of the stack that is neither flashgen's nor PyTorch's,
with the columns of the expression that was being evaluated.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError


def spellings(folder: Path) -> tuple[str, ...]:
    """The path of a folder as imported, perhaps through links, and its real path."""
    return tuple(dict.fromkeys((str(folder.absolute()), str(folder.resolve()))))


NOT_THE_USERS = (*spellings(Path(__file__).parents[1]), *spellings(Path(torch.__file__).parent), "<frozen")


def refuse(code: str, message: str, *, hints: Sequence[str] = ()) -> NoReturn:
    """Raise a ``SpecError`` that points to the line of the mod that is being traced."""
    raise_at(current_place(), code, message, hints=hints)


def refuse_at(function: object, code: str, message: str, *, hints: Sequence[str] = ()) -> NoReturn:
    """Raise a ``SpecError`` that points to where a function is defined."""
    raise_at(place_of(function), code, message, hints=hints)


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
