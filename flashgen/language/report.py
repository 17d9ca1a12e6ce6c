"""Where the stages of the front end put what they find, and sentences that several of them share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flashgen.diagnostics import Diagnostic, Span, nearest
from flashgen.ir.operators import OPERATORS
from flashgen.language import foreign
from flashgen.language.names import FUNCTIONS, Macro

MAX_ERRORS = 100


class GiveUpError(Exception):
    """There are so many errors that the rest would help nobody."""


@dataclass
class Report:
    """Collects diagnostics; repeats of the same code at the same place are dropped."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    _seen: set[tuple[str, str, Span | None]] = field(default_factory=set)
    _errors: int = 0

    def add(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        notes: tuple[str, ...] = (),
        hints: tuple[str, ...] = (),
    ) -> None:
        self.put(Diagnostic(code, message, span, notes=notes, hints=hints))

    def put(self, diagnostic: Diagnostic) -> None:
        """Record a diagnostic; raises ``GiveUpError`` when there are too many."""
        key = (diagnostic.code, diagnostic.message, diagnostic.span)
        if key in self._seen:
            return
        self._seen.add(key)
        self.diagnostics.append(diagnostic)
        self._errors += diagnostic.severity == "error"
        if self._errors > MAX_ERRORS:
            message = f"there are more than {MAX_ERRORS} errors; the rest of the file was not checked"
            self.diagnostics[-1] = Diagnostic("E010", message, diagnostic.span)
            raise GiveUpError

    @property
    def has_errors(self) -> bool:
        """Whether anything recorded is more than a warning."""
        return self._errors > 0


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
