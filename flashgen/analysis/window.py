"""The width of a mask that is a window: how many keys a row keeps, whatever the length of the sequence.

Stage: analyse. In: the condition under which a pair is kept. Out: a number of keys, None where the lengths of the
sequences, or what tensors hold, decide it.
"""

from __future__ import annotations

import functools

from flashgen.analysis.constraints import Bound, Limit
from flashgen.analysis.kept import kept_terms
from flashgen.ir.expr import Expr


@functools.lru_cache(maxsize=64)
def window_width(keep: Expr) -> int | None:
    """The most keys that a row keeps, where every alternative bounds i - j from both sides by numbers."""
    total = 0
    for term in kept_terms(keep):
        widths = [width for each in term.bounds if each.form.is_distance and (width := _width(each)) is not None]
        if not widths:
            return None
        total += max(0, min(widths))
    return total


def _width(bound: Bound) -> int | None:
    least, most = _numbers(bound.least), _numbers(bound.most)
    return min(most) - max(least) + 1 if least and most else None


def _numbers(limits: tuple[Limit, ...]) -> list[int]:
    return [limit.constant for limit in limits if not limit.points]
