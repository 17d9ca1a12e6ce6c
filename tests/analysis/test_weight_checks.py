"""Weights that no row can be divided by, whatever the scores are."""

from __future__ import annotations

import pytest

import flashgen
from flashgen import SpecError


def loaded(weights: str) -> None:
    flashgen.loads(f"attention example {{ head_dim 16  tensor t: f32[H]  weights {weights} }}", backend="reference")


@pytest.mark.parametrize(
    ("weight", "label"),
    [("-exp(s) - 0.5", "is at most -0.5"), ("-8.0", "is at most -8"), ("-relu(s)", "is at most 0")],
)
def test_none_above_0(weight: str, label: str) -> None:
    with pytest.raises(SpecError) as error:
        loaded(f"normalize({weight})")
    (found,) = (each for each in error.value.diagnostics if each.severity == "error")
    assert (found.code, found.label) == ("E310", label)
    assert found.message == f"'normalize' divides by the sum of its weights, but '{weight}' is never above 0"
    assert found.span is not None
    assert "normalize2 takes those of either sign" in found.hints[0]


@pytest.mark.parametrize(
    "weights",
    ["normalize(s)", "normalize(0.0)", "normalize(relu(s) - 1.0)", "normalize(t[h])", "normalize2(-8.0)", "-exp(s)"],
)
def test_some_may_be(weights: str) -> None:
    loaded(weights)
