"""Constants: exact values, the limits of 32 bits, overrides."""

import math

import pytest

from flashgen.diagnostics import SpecError
from flashgen.ir.expr import Literal
from flashgen.ir.types import ScalarType
from tests.language.helpers import codes_of, constant, spec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0x1f", 31),
        ("1_000", 1000),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("2**10", 1024),
        ("2**40 // 2**20", 2**20),
        ("-2147483648", -(2**31)),
        ("7 / 2", 3.5),
        ("6 / 2", 3.0),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("-7.5 // 2", -4.0),
        ("1 + 0.5", 1.5),
        ("3 if true else 4.5", 3.0),
        ("not (1 < 2)", False),
        ("true and 1 == 1.0", True),
        ("ceildiv(7, 2)", 4),
        ("ceildiv(-7, 2)", -3),
        ("popcount(255) + popcount(-1)", 40),
        ("clamp(9, 0, 5)", 5),
        ("min(3, 1, 2) + max(3, 1, 2)", 4),
        ("abs(-3)", 3),
        ("sign(-2.5)", -1.0),
        ("int(2.9) + int(-2.9) + int(1e30) + int(-inf)", -1),
        ("float(3)", 3.0),
        ("round(2.5) + floor(-0.5) + ceil(0.5)", 2.0),
        ("sqrt(16) + log2(8) + exp(0)", 8.0),
        ("log(0)", -math.inf),
        ("exp(-inf)", 0.0),
        ("tanh(inf)", 1.0),
        ("sigmoid(-1000)", 0.0),
        ("relu(-3) + softplus(-1000) + silu(-inf) + gelu(-inf)", 0.0),
        ("pow(2, 3)", 8),
        ("pow(2, -1)", 0.5),
        ("2.0 ** 3", 8.0),
        ("int(true) + int(false)", 1),
        ("-inf", -math.inf),
        ("1 << 30", 2**30),
        ("-8 >> 1", -4),
        ("6 & 3 | 8 ^ 1", 11),
        ("true ^ false", True),
        ("1 // 0 if false else 5", 5),
        ("where(1 < 0, 1 // 0, 5)", 5),
        ("1 > 0 or 1 // 0 > 0", True),
        ("1 < 0 and 1 // 0 > 0", False),
    ],
)
def test_value(text: str, value: float) -> None:
    found = constant(text)
    assert found == value
    assert type(found) is type(value)


def test_pi() -> None:
    assert constant("pi") == math.pi


def test_hash_is_the_tables() -> None:
    from flashgen.ir.build import fold

    assert constant("hash(1, 2, 3)") == fold("hash", 1, 2, 3)
    assert constant("hash(-5)") == fold("hash", -5)
    assert 0 <= constant("hash(12345)") < 2**31


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2147483648", "E205"),
        ("-2147483649", "E205"),
        ("2**31", "E205"),
        ("1 << 31", "E205"),
        ("1 << 10**9", "E205"),
        ("10**10**10", "E205"),
        ("9" * 5000, "E205"),
        ("1e39", "E205"),
        ("1e38 * 10", "E205"),
        ("1e308 * 10.0", "E205"),
        ("exp(1000)", "E205"),
        ("10.0 ** 400", "E205"),
        ("popcount(2**40)", "E205"),
        ("1 // 0", "E206"),
        ("1 % 0", "E206"),
        ("1 / 0", "E206"),
        ("1.0 // 0.0", "E206"),
        ("ceildiv(1, 0)", "E206"),
        ("0 ** -1", "E206"),
        ("0.0 ** -1", "E206"),
        ("inf - inf", "E207"),
        ("inf * 0", "E207"),
        ("sqrt(-1)", "E207"),
        ("log(-1)", "E207"),
        ("(-8) ** 0.5", "E207"),
        ("sin(inf)", "E207"),
        ("1 << -1", "E207"),
        ("Nk", "E209"),
        ("D", "E209"),
        ("i", "E209"),
        ("s", "E209"),
        ("true + 1", "E201"),
    ],
)
def test_no_value(text: str, code: str) -> None:
    assert codes_of(f"const x = {text}\nscore s * x") == [code]


@pytest.mark.parametrize("text", ["s * (i // 0)", "s / 0", "s % (1 - 1)", "s / 0.0", "s * (7 // (i * 0 + 0))"])
def test_division_by_a_constant_zero(text: str) -> None:
    assert codes_of(f"score {text}") == ([] if "i * 0" in text else ["E206"])


def test_what_is_written_in_a_statement_folds_as_well() -> None:
    assert spec("scale 1/16").scale == Literal(ScalarType.FLOAT, value=0.0625)
    assert codes_of("score s + (i + 2**40)") == ["E205"]
    assert codes_of("score s * (i + 2**40 // 2**20)") == []


def test_constants_in_any_order() -> None:
    found = spec("const x = y + 1 const y = z * 2 mask window_left(x) const z = 5")
    assert found.constants == (("x", 11), ("y", 10), ("z", 5))


def test_a_long_chain_of_constants_needs_no_stack() -> None:
    chain = "".join(f"const x{n} = x{n + 1} + 1\n" for n in range(1500))
    assert spec(f"{chain} const x1500 = 0 score s * x0").constants[0] == ("x0", 1500)


def test_constants_see_definitions_and_no_run_time_values() -> None:
    assert constant("softcap(0.0, 2.0)") == 0.0
    assert codes_of("const x = alibi_slope(1) score s * x") == ["E209"]


def test_overrides() -> None:
    body = "const window = 4096 const half = window // 2 const cap = 50.0 const on = true\n"
    body += "mask window_left(half) score softcap(s, cap) if on else s"
    assert spec(body).constants == (("window", 4096), ("half", 2048), ("cap", 50.0), ("on", True))
    changed = spec(body, {"window": 10, "cap": 30, "on": False})
    assert changed.constants == (("window", 10), ("half", 5), ("cap", 30.0), ("on", False))
    assert changed.score == spec("score s").score


@pytest.mark.parametrize("value", [1.0, True, float("nan"), "4", None])
def test_overrides_keep_the_type(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        spec("const n = 4 mask window_left(n)", {"n": value})  # type: ignore[dict-item]
    assert [each.code for each in caught.value.diagnostics] == ["E212"]


def test_an_override_that_does_not_fit() -> None:
    with pytest.raises(SpecError) as caught:
        spec("const n = 4 mask window_left(n)", {"n": 2**31})
    assert [each.code for each in caught.value.diagnostics] == ["E205"]


def test_an_override_may_not_be_nan() -> None:
    with pytest.raises(SpecError) as caught:
        spec("const x = 4.0 score s * x", {"x": float("nan")})
    assert [each.code for each in caught.value.diagnostics] == ["E212"]
