"""What of captured tensors counts, and which of them share a scale."""

from __future__ import annotations

import pytest

from flashgen.analysis.captured import Scale, Use, scales
from flashgen.language.front import parse_text

TENSORS = "tensor t: f32[Nk] tensor u: f32[Nk] tensor d: i64[Nk] tensor e: i32[Nk]"
T, U, D, E = range(4)

FORMULAS = {
    "score s - 0.1 * abs(t[i] - t[j])": [Scale((T,), Use.DIFFERENCE)],
    "score s + t[j] - t[i]": [Scale((T,), Use.DIFFERENCE)],
    "score s + 0.1 * t[i] - t[j] / 10": [Scale((T,), Use.DIFFERENCE)],
    "score s + 0.1 * t[i] - 0.2 * t[j]": [Scale((T,), Use.VALUE)],
    "score s + t[j]": [Scale((T,), Use.VALUE)],
    "score s + u[h] + (t[i] - t[j]) ** 2": [Scale((T,), Use.DIFFERENCE), Scale((U,), Use.VALUE)],
    "score s - exp(t[i] - u[j])": [Scale((T, U), Use.DIFFERENCE)],
    "score s if t[i] > t[j] else -1.0": [Scale((T,), Use.ORDER)],
    "mask d[i] == d[j]": [Scale((D,), Use.ORDER)],
    "mask d[i] == e[j]": [Scale((D, E), Use.ORDER)],
    "mask d[i] == e[j] and e[i] > 3": [Scale((D, E), Use.VALUE)],
    "mask d[j] <= d[i] and d[i] - d[j] < 100": [Scale((D,), Use.DIFFERENCE)],
    "mask d[j] + 100 > d[i]": [Scale((D,), Use.DIFFERENCE)],
    "mask (d[i] if i > 3 else e[j]) < d[0]": [Scale((D, E), Use.ORDER)],
    "mask min(d[i], d[j]) == d[j]": [Scale((D,), Use.ORDER)],
    "mask min(d[i], 7) == d[j]": [Scale((D,), Use.VALUE)],
    "mask d[i] % 7 == d[j] % 7": [Scale((D,), Use.VALUE)],
    "mask float(d[i]) > t[j]": [Scale((T,), Use.VALUE), Scale((D,), Use.VALUE)],
    "mask t[d[i] - d[j]] < t[0]": [Scale((T,), Use.ORDER), Scale((D,), Use.DIFFERENCE)],
    "score s + clamp(t[i] - t[j], 0, 2)": [Scale((T,), Use.DIFFERENCE)],
    "select 16: d[:]": [],
    "select 16: d[:] mask d[i] == d[j]": [Scale((D,), Use.VALUE)],
    "weights softmax(sink = t[i] - t[0])": [Scale((T,), Use.DIFFERENCE)],
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_counts(formula: str) -> None:
    (spec,) = parse_text(f"attention a {{ head_dim 16 {TENSORS} {formula} }}").specs
    assert list(scales(spec)) == FORMULAS[formula]
