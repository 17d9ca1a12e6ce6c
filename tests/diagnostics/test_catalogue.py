"""Codes are stable, explained, and used only if they are in the catalogue."""

import re
from pathlib import Path

from flashgen.diagnostics import CODES

PACKAGE = Path(__file__).parents[2] / "flashgen"


def test_codes_have_their_form_and_a_clause_that_explains_them() -> None:
    for code, words in CODES.items():
        assert re.fullmatch(r"E[0-46]\d\d|W5\d\d", code)
        assert words
        assert not words.endswith(".")
    assert list(CODES) == sorted(CODES)


def test_the_package_uses_no_code_outside_the_catalogue() -> None:
    used = {
        (code, str(path.relative_to(PACKAGE)))
        for path in PACKAGE.rglob("*.py")
        for code in re.findall(r"\"([EW]\d{3})\"", path.read_text(encoding="utf-8"))
    }
    assert {(code, path) for code, path in used if code not in CODES} == set()
