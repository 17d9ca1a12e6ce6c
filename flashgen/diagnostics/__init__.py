"""Diagnostics: what was wrong in a user's text, as data, and the one renderer that shows it."""

from flashgen.diagnostics.codes import CODES, explanation
from flashgen.diagnostics.diagnostic import Diagnostic, in_reading_order
from flashgen.diagnostics.error import SpecError
from flashgen.diagnostics.names import nearest, quoted_list
from flashgen.diagnostics.render import render
from flashgen.diagnostics.span import Source, Span

__all__ = [
    "Span",
    "Source",
    "Diagnostic",
    "SpecError",
    "CODES",
    "explanation",
    "render",
    "in_reading_order",
    "nearest",
    "quoted_list",
]
