"""Sentences that several stages of the front end share: suggestions, and counts of arguments."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.diagnostics import nearest
from flashgen.ir.operators import OPERATORS
from flashgen.language import foreign
from flashgen.language.frames import Macro
from flashgen.language.names import FUNCTIONS

_PARAMETERS = {"where": ("condition", "x", "y"), "clamp": ("x", "lo", "hi"), "hash": ("b", "h", "i", "j")}


def suggestion(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """``did you mean …?`` as a tuple of hints; empty where nothing is close."""
    return tuple(f"did you mean '{candidate}'?" for candidate in nearest(name, known))


def unknown_function(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """What to write for a function that there is not."""
    elsewhere = foreign.FUNCTIONS.get(name)
    defined = (f"a tensor is read by {name}[…], a function is a 'def {name}(x) = …' outside of the block",)
    return (suggestion(name, known) or defined) if elsewhere is None else (elsewhere,)


def wrong_count(name: str, macro: Macro | None, given: int) -> tuple[str, tuple[str, ...]] | None:
    """The message and the hints for a call with the wrong number of arguments; ``macro`` is None for an operator."""
    if macro is None:
        low, high = OPERATORS[FUNCTIONS[name]].fewest, OPERATORS[FUNCTIONS[name]].most
    else:
        low = high = len(macro.parameters or ())
    if low <= given and (high is None or given <= high):
        return None
    if high == low:
        wanted = "no arguments" if low == 0 else f"{low} argument{'s' if low > 1 else ''}"
    else:
        wanted = f"at least {low} argument{'s' if low > 1 else ''}"
    parameters = macro.parameters if macro is not None else _PARAMETERS.get(name, ("x", "y")[:low])
    hints = (f"write {name}({', '.join(parameters)})",) if parameters else ()
    if name in ("min", "max") and given == 1 and macro is None:
        hints = (foreign.ROW,)
    return f"'{name}' takes {wanted}, {given or 'none'} given", hints
