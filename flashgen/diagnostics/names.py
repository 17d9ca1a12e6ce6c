"""Words about names, for messages: the nearest known name, and lists of names."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_LONGEST_COMPARED = 60


def nearest(name: str, known: Iterable[str], *, limit: int = 1) -> tuple[str, ...]:
    """The known names that a misspelt one probably stands for, best first; empty where none is close."""
    if len(name) > _LONGEST_COMPARED:
        return ()
    scored = []
    for candidate in sorted(set(known)):
        score = _likeness(name, candidate)
        if score >= 0.7:
            scored.append((-score, candidate))
    return tuple(candidate for _, candidate in sorted(scored)[:limit])


def _likeness(name: str, candidate: str) -> float:
    """1 for equal names; where only case and underscores differ just below; else the share of common text."""
    if name == candidate:
        return 1.0
    if name.replace("_", "").lower() == candidate.replace("_", "").lower():
        return 0.99
    if min(len(name), len(candidate)) < 2:
        return 0.0
    if len(name) >= 3 and sorted(name) == sorted(candidate):
        return 0.95
    if len(name) >= 4 and candidate.startswith(name):
        return 0.9
    return SequenceMatcher(None, name.lower(), candidate.lower()).ratio()


def quoted_list(names: Iterable[str], conjunction: str = "or") -> str:
    """``'a'``, ``'a' or 'b'``, ``'a', 'b' or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {conjunction} {quoted[-1]}"
