"""Names, literals and operators in C++."""

import math

import pytest

from flashgen.emit.spelling import c_literal, c_operator, user_name


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (-7, "(-7)"),
        (-(2**31), "INT32_MIN"),
        (0.125, "0.125f"),
        (1.0, "1.0f"),
        (-2.5, "(-2.5f)"),
        (1e-30, "1e-30f"),
        (math.inf, "INFINITY"),
        (-math.inf, "(-INFINITY)"),
    ],
)
def test_literals(value: bool | int | float, code: str) -> None:
    assert c_literal(value) == code


def test_nine_digits_tell_neighbouring_floats_apart() -> None:
    one = 1.0 + 2**-23
    assert c_literal(one) != c_literal(1.0)
    assert float(c_literal(one).rstrip("f")) == pytest.approx(one, rel=2**-25)


def test_names_of_users_carry_a_prefix() -> None:
    assert user_name("double") == "of_double"


def test_operands_are_parenthesised_where_they_have_operators() -> None:
    assert c_operator("mul", ("a + b", "c")) == "(a + b) * c"
    assert c_operator("sub", ("f(x)", "(a + b)")) == "f(x) - (a + b)"
    assert c_operator("add", ("f(x) * g(y)", "z")) == "f(x) * g(y) + z"
    assert c_operator("sub", ("z", "f(x) * g(y)")) == "z - f(x) * g(y)"
    assert c_operator("sub", ("z", "a - b")) == "z - (a - b)"
    assert c_operator("tanh", ("a + b",)) == "fg::tanh(a + b)"
    assert c_operator("neg", ("(r.ahead() - c.ahead())",)) == "-(r.ahead() - c.ahead())"
    assert c_operator("neg", ("(a + f(b)) * (c)",)) == "-((a + f(b)) * (c))"
    assert c_operator("mul", ("fg::exp(f(x))", "y")) == "fg::exp(f(x)) * y"
