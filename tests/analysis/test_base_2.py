"""Exponents in base 2, and how large a formula lets them become."""

from __future__ import annotations

import pytest

from flashgen.analysis.factors import LOG2_E, in_base_2, largest_exponent
from flashgen.analysis.variant import analyse
from flashgen.language import parse_text


def largest(score: str, rest: str = "") -> float:
    """Of the softmax of this score."""
    spec = parse_text(f"attention a {{ head_dim 64 score {score} {rest} }}").specs[0]
    return largest_exponent(in_base_2(analyse(spec, spec.head_dims[0]).score))


@pytest.mark.parametrize(
    ("score", "bound"),
    [
        ("softcap(s, 30.0)", 30),
        ("20 * sigmoid(s) - 5", 15),
        ("clamp(s, -8.0, 3.0)", 8),
        ("3 * sin(s) if i > j else softcap(s, 7.0)", 7),
        ("softcap(s, 30.0) if i > j else -inf", 30),  # the condition is part of the mask
    ],
)
def test_bounded(score: str, bound: float) -> None:
    assert bound * LOG2_E <= largest(score) <= 1.0001 * bound * LOG2_E


@pytest.mark.parametrize(
    ("score", "rest"),
    [
        ("s", ""),
        ("s * sigmoid(s)", ""),
        ("softcap(s, 30.0) - 0.5 * (i - j)", ""),
        ("softcap(s, 30.0) + bias[j]", "tensor bias: f32[Nk]"),
        ("softcap(s, cap)", "param cap: f32 = 30.0"),
        ("softcap(s, 30.0) / (i - j)", "mask i > j"),
    ],
)
def test_without_a_bound(score: str, rest: str) -> None:
    """Positions are bounded, by 2^31: too far for any exponent."""
    assert largest(score, rest) > 1e6
