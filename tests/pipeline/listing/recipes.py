"""Which tiles are considered, best first."""

from __future__ import annotations

from flashgen.analysis.variant import Variant

SIZES = (32, 16)


def sizes(variant: Variant) -> tuple[int, ...]:
    return tuple(size for size in SIZES if variant.spec.schedule.Br in (None, size))
