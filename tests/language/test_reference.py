"""The users' reference says what the code does."""

import re
from pathlib import Path

import pytest

from flashgen.diagnostics import CODES
from flashgen.language import names, parse_text
from flashgen.language.functions import FUNCTIONS
from flashgen.language.imports import standard_definitions
from flashgen.language.parser import MAX_TOKENS
from flashgen.language.statements import MAX_HEAD_DIM, SCHEDULE_ENTRIES
from flashgen.language.words import RESERVED, STATEMENTS
from tests.language.helpers import mask, spec

REFERENCE = (Path(__file__).parents[2] / "specs" / "LANGUAGE.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", REFERENCE))))


def test_it_lists_every_code() -> None:
    assert dict(re.findall(r"^\| ([EW]\d{3}) \| (.*) \|$", REFERENCE, re.MULTILINE)) == dict(CODES)


def test_it_names_everything() -> None:
    assert set(FUNCTIONS) <= WORDS
    assert set(names.BUILTINS) <= WORDS
    assert set(standard_definitions()) <= WORDS
    assert set(SCHEDULE_ENTRIES) <= WORDS
    assert RESERVED <= WORDS
    for statement in STATEMENTS:
        assert re.search(rf"^### `{statement}\b", REFERENCE, re.MULTILINE), statement


def test_it_states_the_limits() -> None:
    assert f"{MAX_TOKENS:,}" in REFERENCE
    assert f"1 to {MAX_HEAD_DIM}" in REFERENCE


def test_its_first_spec_parses() -> None:
    (first,) = re.findall(r"```\n(# gemma2_local.*?)```", REFERENCE, re.DOTALL)
    assert parse_text(first).specs == parse_text(first).specs


PRELUDE = re.findall(r"^\| `(\w+(?:\([\w, ]*\))?)` \| `([^`]*)` \|$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize(("head", "body"), PRELUDE)
def test_its_prelude_is_the_prelude(head: str, body: str) -> None:
    parameters = [name for name in re.findall(r"\w+", head.partition("(")[2]) if name not in {"ids", "h", "x"}]
    declared = " ".join(f"const {name} = {place + 2}" for place, name in enumerate(parameters))
    use, text = head.replace("(x", "(s"), body.replace("x /", "s /")
    place = "layout block 64:" if "I" in body else "score" if head[:2] in ("al", "so") else "mask"
    start = f"tensor ids: i32[B, Nk] {declared} {place} "
    left, right = spec(start + use), spec(start + text)
    assert (left.mask, left.layout, left.score) == (right.mask, right.layout, right.score)


def test_every_simple_definition_of_the_prelude_is_in_the_tables() -> None:
    assert {head.partition("(")[0] for head, _ in PRELUDE} | {"neighborhood_2d"} == set(standard_definitions())


def test_its_claims_about_constants() -> None:
    assert mask("i < 2**40 // 2**20") == mask("i < 1048576")
    assert spec("const n = 0 score s / n if n != 0 else s").score == spec("score s").score
