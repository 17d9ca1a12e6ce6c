"""``SpecError``: every diagnostic of one run, raised once."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.diagnostics.diagnostic import Diagnostic
from flashgen.diagnostics.render import render
from flashgen.diagnostics.span import Source


class SpecError(Exception):
    """A user's mistake, as data: every diagnostic of one run and the texts that they point into."""

    def __init__(self, diagnostics: Sequence[Diagnostic], sources: Sequence[Source] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.sources = tuple(sources)
        super().__init__(self.diagnostics, self.sources)

    def __str__(self) -> str:
        return render(self.diagnostics, self.sources)
