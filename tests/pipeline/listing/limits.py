"""What this family refuses: dropout."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic


def limits(variant: Variant) -> tuple[Diagnostic, ...]:
    if variant.spec.dropout is None:
        return ()
    return (Diagnostic("E404", "listings know no dropout", variant.spec.place("dropout")),)
