"""Diagnostics: what was wrong in a user's text, as data, and the one renderer that shows it."""

from flashgen.diagnostics.diagnostic import CODES, Diagnostic, Source, Span, in_reading_order
from flashgen.diagnostics.render import SpecError, nearest, quoted_list, render, spoken_list

__all__ = [
    "Span",
    "Source",
    "Diagnostic",
    "SpecError",
    "CODES",
    "render",
    "in_reading_order",
    "nearest",
    "quoted_list",
    "spoken_list",
]
