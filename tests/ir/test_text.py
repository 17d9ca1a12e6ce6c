"""Expressions as text: what is printed parses to the same expression."""

import pytest

from flashgen.ir.text import text
from flashgen.language import parse_text


@pytest.mark.parametrize(
    "written",
    [
        "s + i",
        "s - 0.5 * (i - j)",
        "-float(i) * s",
        "float(i * j) + s",
        "s * (i / j)",
        "s ** 2",
        "-(s ** 2)",
        "(s + 1.0) ** 2",
        "s if i > j and not j == 3 else tanh(s)",
        "(s if i > j else 0.0) * 2.0",
        "s * float(i << 2 & 7)",
        "min(s, 1.0) - max(float(i), s)",
        "s * int(s)",
        "2.0 - (1.0 - s)",
        "2.0 / (s / 3.0)",
    ],
)
def test_text_parses_to_the_same_expression(written: str) -> None:
    first = parse_text(f"attention a {{ head_dim 16 score {written} }}").specs[0].score
    again = parse_text(f"attention a {{ head_dim 16 score {text(first)} }}").specs[0].score
    assert again == first, text(first)


def test_promotions_are_not_written() -> None:
    score = parse_text("attention a { head_dim 16 score s - 0.5 * (i - j) }").specs[0].score
    assert text(score) == "s - 0.5 * (i - j)"
