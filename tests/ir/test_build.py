"""Typing: what the operators accept, what they promote to, and what is said where they refuse."""

from __future__ import annotations

import pytest

from flashgen.ir.build import (
    TypingError,
    apply,
    conjunction,
    constant,
    constant_value,
    disjunction,
    fold,
    power,
)
from flashgen.ir.expr import Apply, Expr, Load, index, literal, score_input
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType
from tests.ir.expressions import expr

ROW, J, S = index("i"), index("j"), score_input("s")
IS_NEAR = apply("lt", ROW, J)
OPERANDS = {"b": IS_NEAR, "i": ROW, "f": S}
NAMES = {ScalarType.BOOL: "b", ScalarType.INT: "i", ScalarType.FLOAT: "f"}

# Operand types → result type, for each family; what is not listed is refused.
NUMERIC = {"ii": "i", "if": "f", "fi": "f", "ff": "f"}
REAL = {"ii": "f", "if": "f", "fi": "f", "ff": "f"}
INTS, CONDITIONS, BITS = {"ii": "i"}, {"bb": "b"}, {"bb": "b", "ii": "i"}
EITHER, FUNCTION = {"i": "i", "f": "f"}, {"i": "f", "f": "f"}
COMPARISON = {"ii": "b", "if": "b", "fi": "b", "ff": "b"}
TABLE = {
    **dict.fromkeys(("add", "sub", "mul", "floordiv", "mod", "min", "max"), NUMERIC),
    **dict.fromkeys(("div", "pow"), REAL),
    **dict.fromkeys(("ipow", "shl", "shr", "ceildiv"), INTS),
    **dict.fromkeys(("lt", "le", "gt", "ge"), COMPARISON),
    **dict.fromkeys(("eq", "ne"), COMPARISON | {"bb": "b"}),
    **dict.fromkeys(("and", "or"), CONDITIONS),
    **dict.fromkeys(("bitand", "bitor", "bitxor"), BITS),
    **dict.fromkeys(("neg", "abs", "sign"), EITHER),
    "not": {"b": "b"},
    "popcount": {"i": "i"},
    "to_int": {"b": "i", "i": "i", "f": "i"},
    "to_float": {"b": "f", "i": "f", "f": "f"},
    "where": {f"b{pair}": result for pair, result in (NUMERIC | {"bb": "b"}).items()},
    "clamp": {a + b + c: "i" if a + b + c == "iii" else "f" for a in "if" for b in "if" for c in "if"},
    "hash": {"i" * n: "i" for n in (1, 2, 3)},
    **dict.fromkeys(("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "atan"), FUNCTION),
    **dict.fromkeys(("tanh", "sigmoid", "silu", "relu", "gelu", "erf", "softplus"), FUNCTION),
    **dict.fromkeys(("floor", "ceil", "round"), FUNCTION),
}


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(OPERATORS)


@pytest.mark.parametrize("op", TABLE)
def test_typing(op: str) -> None:
    arities = {len(types) for types in TABLE[op]}
    for arity in arities:
        for types in _words(arity):
            operands = [OPERANDS[t] for t in types]
            if types not in TABLE[op]:
                with pytest.raises(TypingError) as refused:
                    apply(op, *operands)
                assert OPERATORS[op].spelling in refused.value.message
                continue
            result = apply(op, *operands)
            assert NAMES[result.type] == TABLE[op][types]
            if isinstance(result, Apply) and result.op == op:
                assert OPERATORS[op].signature(tuple(arg.type for arg in result.args)).arguments == tuple(
                    arg.type for arg in result.args
                )


def _words(length: int) -> list[str]:
    return [""] if length == 0 else [word + t for word in _words(length - 1) for t in "bif"]


@pytest.mark.parametrize(
    ("op", "operands", "message", "argument"),
    [
        ("add", (ROW, IS_NEAR), "'+' takes numbers, not a bool as operand 2", 1),
        ("exp", (IS_NEAR,), "'exp' takes numbers, not a bool", 0),
        ("and", (IS_NEAR, ROW), "'and' takes conditions, not an int as operand 2", 1),
        ("shl", (ROW, S), "'<<' takes ints, not a float as operand 2", 1),
        ("eq", (IS_NEAR, ROW), "'==' cannot compare a bool with an int", 0),
        ("where", (ROW, S, S), "the condition of 'where' must be a bool, not an int", 0),
        ("where", (IS_NEAR, S, IS_NEAR), "the branches of 'where' are a float and a bool", 2),
        ("bitand", (ROW, S), "'&' takes two ints or two bools, not a float as operand 2", 1),
        ("exp", (ROW, J), "'exp' takes 1 argument, 2 given", None),
        ("clamp", (ROW,), "'clamp' takes 3 arguments, 1 given", None),
        ("hash", (), "'hash' takes at least 1 argument, none given", None),
        ("min", (ROW,), "'min' takes 2 arguments, 1 given", None),
    ],
)
def test_messages(op: str, operands: tuple[Expr, ...], message: str, argument: int | None) -> None:
    with pytest.raises(TypingError) as refused:
        apply(op, *operands)
    assert (refused.value.message, refused.value.argument) == (message, argument)


def test_promotion_inserts_conversions() -> None:
    assert apply("add", ROW, S) == apply("add", apply("to_float", ROW), S)
    assert apply("add", literal(2), S) == apply("add", literal(2.0), S)
    assert apply("to_float", S) is S
    assert apply("to_int", ROW) is ROW
    assert apply("max", ROW, J, literal(3)) == apply("max", apply("max", ROW, J), literal(3))


def test_powers() -> None:
    assert power(ROW, literal(2)) == apply("ipow", ROW, literal(2))
    assert power(ROW, expr("3 - 1")).type is ScalarType.INT
    assert power(ROW, literal(-1)).type is ScalarType.FLOAT
    assert power(ROW, J) == apply("ipow", ROW, J)
    assert power(S, literal(2)) == apply("pow", S, literal(2.0))
    assert power(literal(2), S).type is ScalarType.FLOAT


def test_constants() -> None:
    assert constant(2**31 - 1) == literal(2**31 - 1)
    assert constant(-(2**31)) == literal(-(2**31))
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(TypingError, match="does not fit in a 32-bit int"):
            constant(value)
    assert constant_value(expr("(2 * side - 1) ** 2", side=7)) == 169
    assert constant_value(expr("i + 1")) is None
    assert constant_value(Load(ScalarType.INT, tensor="t", indices=(literal(0),))) is None


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("add", (2**31 - 1, 1), -(2**31)),
        ("mul", (65536, 65536), 0),
        ("neg", (-(2**31),), -(2**31)),
        ("abs", (-(2**31),), -(2**31)),
        ("floordiv", (-7, 2), -4),
        ("floordiv", (7, 0), 0),
        ("floordiv", (-(2**31), -1), -(2**31)),
        ("mod", (-7, 3), 2),
        ("mod", (7, -3), -2),
        ("mod", (7, 0), 0),
        ("floordiv", (-7.5, 2.0), -4.0),
        ("mod", (-7.5, 2.0), 0.5),
        ("ceildiv", (65, 64), 2),
        ("ceildiv", (-1, 64), 0),
        ("ipow", (3, 4), 81),
        ("ipow", (2, -1), 0),
        ("ipow", (-1, -3), -1),
        ("ipow", (0, 0), 1),
        ("ipow", (2, 32), 0),
        ("to_int", (float("nan"),), 0),
        ("to_int", (1e30,), 2**31 - 1),
        ("to_int", (-1e30,), -(2**31)),
        ("to_int", (float("inf"),), 2**31 - 1),
        ("to_int", (-2.9,), -2),
        ("to_int", (True,), 1),
        ("round", (2.5,), 2.0),
        ("round", (-0.5,), 0.0),
        ("shl", (1, 31), -(2**31)),
        ("shl", (1, 32), 0),
        ("shl", (1, -1), 0),
        ("shr", (-8, 1), -4),
        ("shr", (-8, 40), -1),
        ("shr", (8, -1), 0),
        ("popcount", (-1,), 32),
        ("sign", (float("nan"),), 0.0),
        ("relu", (-1.0,), 0.0),
        ("eq", (float("nan"), float("nan")), False),
        ("ne", (float("nan"), float("nan")), True),
        ("clamp", (5, 9, 3), 3),
        ("hash", (0,), 0x9E3779B9),
    ],
)
def test_values_of_the_contract(op: str, values: tuple[float, ...], expected: float) -> None:
    if op == "hash":
        expected = _hash(*map(int, values))
    assert fold(op, *values) == expected


def _hash(*args: int) -> int:
    h = 0x9E3779B9
    for x in args:
        h ^= x & 0xFFFFFFFF
        h = h * 0x85EBCA6B % 2**32
        h ^= h >> 13
        h = h * 0xC2B2AE35 % 2**32
        h ^= h >> 16
    return h & 0x7FFFFFFF


def test_junctions() -> None:
    assert conjunction() == literal(True)
    assert disjunction() == literal(False)
    assert conjunction(IS_NEAR, IS_NEAR) == apply("and", IS_NEAR, IS_NEAR)
    assert disjunction(IS_NEAR) is IS_NEAR
