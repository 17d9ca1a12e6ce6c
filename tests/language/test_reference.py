"""The users' reference says what the code does."""

import re
from pathlib import Path

import pytest

from flashgen.diagnostics import CODES
from flashgen.ir.operators_base import MOST_BITS
from flashgen.ir.spec import OP_ARGUMENTS
from flashgen.language import names, parse_text
from flashgen.language.imports import standard_definitions
from flashgen.language.names import FUNCTIONS
from flashgen.language.nodes import MOST_DIGITS
from flashgen.language.parser import MAX_TOKENS
from flashgen.language.statements import MAX_HEAD_DIM, SCHEDULE_ENTRIES
from flashgen.language.words import RESERVED, STATEMENTS
from tests.language.helpers import codes, codes_of, mask, spec

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


def test_it_lists_the_arguments_of_every_op() -> None:
    (listed,) = re.findall(r"argument that every op has \(`([^`]*)`\)", REFERENCE)
    assert set(listed.split()) == OP_ARGUMENTS


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


# The table of section 4: what each place is called in its head, and a spec with a name there.
PLACES = {
    "`score`": "score s + 0 * int({0} != {0}) {1}",
    "`mask`": "mask {0} == {0} {1}",
    "`layout`": "layout block 64: {0} == {0} {1}",
    "`select`": "tensor idx: i32[9, 2] select 64: idx[int({0} == {0}), :] {1}",
    "`weights`": "weights s * ({0} - {0}) {1}",
    "sink": "weights softmax(sink = {0} * 1.0) {1}",
    "`scale`": "scale 0.1 * {0} {1}",
}
_LINES = REFERENCE[REFERENCE.index("## 4.") : REFERENCE.index("All indices and sizes are ints")].splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in _LINES if line.startswith("| ")][1:]
_DECLARED = "param p: f32 = 1.0  tensor t: f32[4]  const c = 2  "
_NAMES_OF_ROWS = {
    "params": ("p",),
    "tensors": ("t[0]",),
    "constants, `pi`, `inf`, `true`, `false`": ("c", "pi"),
}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_its_table_of_names(row: list[str]) -> None:
    names_of_row, _, *ticks, last = row
    own = _NAMES_OF_ROWS.get(names_of_row) or re.findall(r"\w+", names_of_row)
    for name in own:
        for (place, pattern), tick in zip(PLACES.items(), ticks, strict=True):
            found = [code for code in codes_of(_DECLARED + pattern.format(name, "")) if code not in {"E201", "E208"}]
            assert (not found) is (tick == "✓"), f"{name} in {place}: {found}"
        if "[" not in name:
            as_shape = codes_of(_DECLARED + f"tensor u: f32[{name}]")
            as_default = codes_of(_DECLARED + f"param u: f32 = {name}")
            assert (not as_default) is (last != ""), f"{name} as a default: {as_default}"
            assert (not {"E101", "E108"} & set(as_shape)) is (last == "✓"), f"{name} in a shape: {as_shape}"


def test_its_table_of_names_was_found() -> None:
    assert len(ROWS) == 10


CLAIMS = [
    # 2. Files
    ("\ufeffattention a { head_dim 64 }", []),
    ("attention a {\r\nhead_dim 64\rmask causal }  # a comment", []),
    ("attention causal { head_dim 64   mask causal }", []),
    ("attention a { head_dim 64 score min(s, 1,) + t[h,] tensor t: f32[H] }", []),
    ("attention a { head_dim 64 tensor grad: f32[H] const block = 2 score grad[h] * block }", []),
    ("attention a { head_dim 64 } attention a { head_dim 64 }", ["E104"]),
    ("attention class { head_dim 64 }", ["E111"]),
    ("def f(x) = x", ["E009"]),
    # 3. Statements
    ("attention a { head_dim 64, 128, 192/128 }", []),
    ("attention a { head_dim (128//2), (256/4)//1 }", ["E208"]),
    ("attention a { head_dim 64//2, 2*32 }", []),
    ("attention a { head_dim 64, 64 }", ["E304"]),
    ("attention a { head_dim 577 }", ["E303"]),
    ("attention a { head_dim 512 }", []),
    ("attention a { mask causal }", ["E301"]),
    ("attention a { head_dim 64 mask causal mask causal }", ["E302"]),
    ("attention a { head_dim 64 const n = m const m = 3 mask i < n }", []),
    ("attention a { head_dim 64 const n = Nk }", ["E209"]),
    ("attention a { head_dim 64 param p: f32 = -log(Nk) param q_: f32 = p + 1 score s + q_ }", []),
    ("attention a { head_dim 64 param p: i32 grad score s + p }", ["E306"]),
    ("attention a { head_dim 64 tensor t: i32[H] grad score s + t[h] }", ["E306"]),
    ("attention a { head_dim 64 tensor t: f32[ceildiv(Nq, 64), 2 * Nk - 1] score s + t[0, 0] }", []),
    ("attention a { head_dim 64 let twice = 2 * s score twice weights exp(twice) }", []),
    ("attention a { head_dim 64 score twice let twice = 2 * s }", ["E107"]),
    ("attention a { head_dim 64 let x = dot mask x > 0 }", ["E108"]),
    ("attention a { head_dim 64 score where(s > 0, s, -inf) }", []),
    ("attention a { head_dim 64 mask s > 0 }", ["E108"]),
    ("attention a { head_dim 64 dropout 1 }", ["E305"]),
    ("attention a { head_dim 64 dropout 0 }", []),
    ("attention a { head_dim 64 param p: f32 dropout p }", []),
    ("attention a { head_dim 64 param p: f32 grad dropout p }", ["E306"]),
    ("attention a { head_dim 64 layout block 0: I == J }", ["E309"]),
    ("attention a { head_dim 64 schedule { Br = 128 Bc = 64 warps = 4 stages = 2 } }", []),
    ("attention a { head_dim 64 schedule { Br = 0 } }", ["E402"]),
    # 4. Names
    ("attention a { head_dim 64 const window = 4096 mask window_left(window) and window(3) }", []),
    ("attention a { head_dim 64 let causal = 1 }", ["E105"]),
    ("attention a { head_dim 64 let s = 1 }", ["E105"]),
    # 5. Expressions
    ("attention a { head_dim 64 mask 0 <= i - j < 8 }", []),
    ("attention a { head_dim 64 score +s }", ["E006"]),
    ("attention a { head_dim 64 score s * (0x1f + 0b101 + 0o17 + 1_000 + 1e-3 + .5 + 2.) }", []),
    ("attention a { head_dim 64 mask i }", ["E208"]),
    ("attention a { head_dim 64 score s + (i > j) }", ["E201"]),
    ("attention a { head_dim 64 score s + int(i > j) }", []),
    ("attention a { head_dim 64 mask true == (i > j) and (i > 3) | (j > 3) }", []),
    ("attention a { head_dim 64 score s / 0 }", ["E206"]),
    ("attention a { head_dim 64 score s + 2**31 }", ["E205"]),
    ("attention a { head_dim 64 score s * 1e39 }", ["E205"]),
    ("attention a { head_dim 64 score s + sqrt(-1) }", ["E207"]),
    ("attention a { head_dim 64 score s + (inf - inf) }", ["E207"]),
    ("attention a { head_dim 64 score where(s > 0, s, log(0)) }", []),
    ("attention a { head_dim 64 const n = 1 << -1 }", ["E207"]),
    ("attention a { head_dim 64 const n = 0 score s / nothing if n != 0 else s }", ["E101"]),
    ("attention a { head_dim 64 mask j < 2**300 // 2**290 }", ["E205", "E205"]),
    ("attention a { head_dim 64 mask j < 2**250 // 2**240 }", []),
    # 6. Tensors
    ("attention a { head_dim 64 tensor t: f32[H, Nk] score s + t[h] }", ["E203"]),
    ("attention a { head_dim 64 tensor t: bool[Nk] mask t[j] }", []),
    ("attention a { head_dim 64 tensor t: bool[Nk] score s + t[j] }", ["E201"]),
    # 7. Weights
    ("attention a { head_dim 64 weights softmax(sink = 1 + h) }", []),
    ("attention a { head_dim 64 weights silu(s) / Nk }", []),
    ("attention a { head_dim 64 weights normalize(relu(s)) }", []),
    ("attention a { head_dim 64 weights normalize(dot) }", ["E108"]),
    ("attention a { head_dim 64 weights 2 * softmax }", ["E310"]),
    # 11. Definitions
    ("def near(w) = abs(i - j) <= w  def early = i < 16  attention a { head_dim 64 mask near(3) or early }", []),
    ("def bias(t, x) = t[h, x] / 2  attention a { head_dim 64 tensor u: f32[H, Nk] score s + bias(u, j) }", []),
    ("def f(h) = h + 1  attention a { head_dim 64 score s + f(i) }", []),
    ("def f() = 1  attention a { head_dim 64 score s + f() }", []),
    ("def f() = 1  attention a { head_dim 64 score s + f }", ["E204"]),
    ("def f = 1  attention a { head_dim 64 score s + f() }", ["E202"]),
    ("def f = n  attention a { head_dim 64 const n = 1 score s + f }", ["E101"]),
    ("def f(x) = f(x)  attention a { head_dim 64 score f(s) }", ["E307"]),
    ("def f(x) = x  attention a { head_dim 64 score f(x = s) }", ["E202"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CLAIMS, ids=[text[:70] for text, _ in CLAIMS])
def test_its_claims(text: str, expected: list[str]) -> None:
    assert codes(text) == expected


def test_its_limits_of_definitions_and_gpus() -> None:
    assert f"{MOST_BITS} bits" in REFERENCE
    assert f"{MOST_DIGITS} characters" in REFERENCE
