"""A folder of mistakes: ``NAME.attn`` beside ``NAME.expected``, what the user is shown.

A new test is two files. ``UPDATE_EXPECTED=1 pytest tests/errors`` writes the second; read it before you commit it.
A comment ``# const: NAME = VALUE`` in the spec overrides a constant.
"""

import ast
import os
import re
from pathlib import Path

import pytest

from flashgen.diagnostics import CODES, SpecError, render
from flashgen.language import parse_file

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*.attn"))

# Reported by later stages, and tested with them.
LATER = {"E211", "E311", "E403", "E404", "E405", "E406", "W501", "W505", "W506"} | {f"E60{n}" for n in range(1, 7)}
# About the file as a whole, tested in tests/language/test_text.py.
UNREADABLE = {"E001", "E002", "E003"}


def shown(path: Path) -> str:
    overrides = re.findall(r"^# const: (\w+) = (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        file = parse_file(path.name, {name: ast.literal_eval(value) for name, value in overrides})
    except SpecError as error:
        return str(error) + "\n"
    return render(file.warnings, file.sources) + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_diagnostics_are_as_expected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    expected = path.with_suffix(".expected")
    report = shown(path)
    if os.environ.get("UPDATE_EXPECTED"):
        expected.write_text(report, encoding="utf-8")
    assert report == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_first_code_is_the_one_that_names_the_case(path: Path) -> None:
    code = re.match(r"[ew]\d{3}", path.stem)
    if code:
        report = path.with_suffix(".expected").read_text(encoding="utf-8")
        assert f"[{code[0].upper()}]" in report


def test_every_code_has_a_case() -> None:
    covered = {
        code
        for path in CASES
        for code in re.findall(r"\[([EW]\d{3})\]", path.with_suffix(".expected").read_text(encoding="utf-8"))
    }
    assert covered >= set(CODES) - LATER - UNREADABLE
    assert covered <= set(CODES)


def test_every_expectation_has_its_spec() -> None:
    assert {path.stem for path in HERE.glob("*.expected")} == {path.stem for path in CASES}
