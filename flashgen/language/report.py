"""Where the stages of the front end put what they find."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.diagnostics import Diagnostic, Span

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
