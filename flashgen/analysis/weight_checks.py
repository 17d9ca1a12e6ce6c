"""Diagnostics of weights that cannot be normalised: an error where no weight is above 0, whatever the score.

Stage: analyse. In: a spec. Out: diagnostics. Weights that are below 0 for some scores only are allowed
(specs/LANGUAGE.md, section 7).
"""

from __future__ import annotations

from flashgen.analysis.prover import symbol_ranges
from flashgen.analysis.ranging import bounds
from flashgen.diagnostics.diagnostic import Diagnostic
from flashgen.ir.interval import FloatRange
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text


def weight_diagnostics(spec: AttentionSpec) -> tuple[Diagnostic, ...]:
    """An error where the sum that weights are divided by is below 0 (or 0), so that its logarithm is NaN."""
    weight = spec.weights.weight
    if weight is None or not spec.weights.form.is_sum:
        return ()
    found = bounds(weight, symbol_ranges(None))
    if not isinstance(found, FloatRange) or found.hi > 0 or found.lo == 0:
        return ()
    word = spec.weights.form.word
    message = f"'{word}' divides by the sum of its weights, but '{text(weight)}' is never above 0"
    hints = (f"its weights are 0 or more, as in {word}(exp(s)); normalize2 takes those of either sign",)
    return (Diagnostic("E310", message, weight.span, f"is at most {found.hi + 0.0:g}", hints=hints),)
