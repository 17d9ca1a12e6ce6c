"""Suggestions and lists of names."""

import pytest

from flashgen.diagnostics import nearest, quoted_list

KNOWN = ("window_left", "window", "causal", "Nq", "Nk", "cap", "i", "j", "float", "softmax")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("window_lft", "window_left"),
        ("windowleft", "window_left"),
        ("Causal", "causal"),
        ("nk", "Nk"),
        ("cpa", "cap"),
        ("wind", "window"),
        ("softmx", "softmax"),
    ],
)
def test_the_nearest_name(written: str, meant: str) -> None:
    assert nearest(written, KNOWN) == (meant,)


@pytest.mark.parametrize("written", ["x", "q", "bucket", "", "x" * 10_000])
def test_nothing_where_nothing_is_near(written: str) -> None:
    assert nearest(written, KNOWN) == ()


def test_the_limit() -> None:
    assert nearest("Nx", ("Nq", "Nk"), limit=2) == ()
    assert len(nearest("windo", KNOWN, limit=2)) == 2


def test_lists() -> None:
    assert quoted_list([]) == ""
    assert quoted_list(["a"]) == "'a'"
    assert quoted_list(["a", "b"]) == "'a' or 'b'"
    assert quoted_list(["a", "b", "c"], "and") == "'a', 'b' and 'c'"
