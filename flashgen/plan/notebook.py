"""How notebooks show a thing. Pictures are made of what they show, so that they stand above it, and register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By the name of what is drawn. A drawing imports what it needs when it is called.
DRAWINGS: dict[str, Callable[[Any], str]] = {}


def drawn(what: str, thing: object) -> str:
    """The picture of a thing, as HTML or as letters."""
    return DRAWINGS[what](thing)
